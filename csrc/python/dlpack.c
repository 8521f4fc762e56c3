/* SPDX-License-Identifier: Apache-2.0 */
/* torch's tensors: read, and made over shared memory.
 *
 * A torch that offers DLPack's exchange API does both in one C function each. An older one is asked for a
 * tensor's attributes, and receives a capsule. */
#include "python/binding.h"

#include <stdlib.h>
#include <string.h>

/* ---- the layouts of DLPack's specification: the tensor, version 0, version 1, the exchange API ---- */

typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *);
} dl_managed;

typedef struct {
    uint32_t major, minor;
} dl_version;

typedef struct dl_versioned {
    dl_version version;
    void *context;
    void (*deleter)(struct dl_versioned *);
    uint64_t flags;
    dl_tensor tensor;
} dl_versioned;

typedef struct dl_exchange_api {
    dl_version version;
    const struct dl_exchange_api *older;
    void (*allocate)(void);
    void (*export)(void);
    int (*import)(dl_versioned *from, void **tensor);
    int (*read)(void *tensor, dl_tensor *result);
    void (*stream)(void);
} dl_exchange_api;

enum { DL_CPU = 1, DL_UINT = 1, DL_COMPLEX = 5, DL_MAJOR = 1 };

static struct {
    PyObject *from_dlpack; /* makes a tensor of a capsule */
    PyObject *byte;        /* torch.uint8 */
    const dl_exchange_api *api;
} torch;

const char spar_py_use_torch_doc[] =
    PyDoc_STR("use_torch(from_dlpack, byte, api)\n\n"
              "from_dlpack: makes a tensor of a capsule. byte: torch.uint8. api:\n"
              "torch.Tensor.__dlpack_c_exchange_api__, or None.");

PyObject *spar_py_use_torch(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *from_dlpack, *byte, *capsule;
    const dl_exchange_api *api = NULL;
    if (!PyArg_ParseTuple(args, "OOO", &from_dlpack, &byte, &capsule))
        return NULL;
    if (capsule != Py_None && !(api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api")))
        return NULL;
    while (api && api->version.major != DL_MAJOR)
        api = api->older;
    torch.api = api && api->read && api->import ? api : NULL;
    Py_XDECREF(torch.from_dlpack);
    Py_XDECREF(torch.byte);
    torch.from_dlpack = Py_NewRef(from_dlpack);
    torch.byte = Py_NewRef(byte);
    Py_RETURN_NONE;
}

PyObject *spar_py_byte_dtype(void)
{
    return torch.byte;
}

/* ---- reading ---- */

/* Returns 0 where the API cannot tell: no strided tensor, or a dtype that DLPack lacks. */
static int read_by_api(PyObject *tensor, dl_tensor *result)
{
    if (!torch.api)
        return 0;
    if (torch.api->read(tensor, result) == 0)
        return 1;
    PyErr_Clear();
    return 0;
}

static uint64_t kind_of(const dl_tensor *tensor)
{
    uint64_t device = (uint64_t)tensor->device.type << 16 | (uint16_t)tensor->device.id;
    return device << 32 | (uint64_t)tensor->dtype.lanes << 16 | tensor->dtype.bits << 8 | tensor->dtype.code;
}

int spar_py_ordinal(PyObject *tensor, uint64_t kind, int *ordinal)
{
    *ordinal = (int16_t)(kind >> 32);
    if (kind)
        return 0;
    PyObject *number = PyObject_CallMethod(tensor, "get_device", NULL);
    *ordinal = number ? (int)PyLong_AsLong(number) : 0;
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static int ask_for_address(PyObject *tensor, void **address)
{
    PyObject *number = PyObject_CallMethod(tensor, "data_ptr", NULL);
    *address = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static int ask_for_all(PyObject *tensor, spar_py_tensor *result, int64_t *numbers)
{
    int failed = ask_for_address(tensor, &result->address);
    PyObject *shape = failed ? NULL : PyObject_GetAttrString(tensor, "shape");
    PyObject *stride = shape ? PyObject_CallMethod(tensor, "stride", NULL) : NULL;
    Py_ssize_t ndim = stride && PyTuple_Check(shape) ? PyTuple_Size(shape) : -1;
    if (stride && (ndim < 0 || !PyTuple_Check(stride) || PyTuple_Size(stride) != ndim))
        PyErr_SetString(PyExc_TypeError, "a tensor's shape and stride() must be tuples of one length");
    else if (stride && ndim <= SPAR_MAX_DIMS && spar_read_ints(shape, numbers, ndim) == 0)
        spar_read_ints(stride, numbers + ndim, ndim);
    result->ndim = (int)ndim;
    result->kind = 0;
    Py_XDECREF(shape);
    Py_XDECREF(stride);
    return PyErr_Occurred() ? -1 : 0;
}

int spar_py_read_tensor(PyObject *tensor, spar_py_tensor *result, int64_t *numbers)
{
    dl_tensor found;
    if (!read_by_api(tensor, &found))
        return ask_for_all(tensor, result, numbers);
    *result = (spar_py_tensor){(char *)found.data + found.byte_offset, found.ndim, kind_of(&found)};
    if (found.ndim <= SPAR_MAX_DIMS) {
        memcpy(numbers, found.shape, (size_t)found.ndim * sizeof *numbers);
        memcpy(numbers + found.ndim, found.strides, (size_t)found.ndim * sizeof *numbers);
    }
    return 0;
}

int spar_py_address(PyObject *tensor, void **address)
{
    dl_tensor found;
    if (!read_by_api(tensor, &found))
        return ask_for_address(tensor, address);
    *address = (char *)found.data + found.byte_offset;
    return 0;
}

/* ---- outputs ---- */

/* Both run on any thread, without the GIL, even after the interpreter has ended. */
static void free_output(dl_managed *managed)
{
    spar_memory_free(managed->context);
    free(managed);
}

static void free_versioned(dl_versioned *managed)
{
    spar_memory_free(managed->context);
    free(managed);
}

static void free_capsule(PyObject *capsule)
{
    if (!PyCapsule_IsValid(capsule, "dltensor"))
        return; /* torch consumed and renamed it */
    dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    managed->deleter(managed);
}

/* What torch must know of an output; `shape` has room for its extents. */
static dl_tensor output_of(spar_memory *block, const spar_plan_tensor *tensor, int summed, int dtype,
                           int64_t *shape)
{
    dl_tensor result = {.data = spar_memory_address(block), .ndim = tensor->ndim - summed, .shape = shape};
    result.device.type = DL_CPU;
    result.dtype.code = dtype                     ? spar_scale_types[dtype].dlpack_code
                        : tensor->item_size == 16 ? DL_COMPLEX
                                                  : DL_UINT;
    result.dtype.bits = (uint8_t)(tensor->item_size * 8);
    result.dtype.lanes = 1;
    memcpy(shape, tensor->out + summed, (size_t)result.ndim * sizeof *shape);
    return result;
}

static PyObject *import_by_capsule(dl_managed *managed)
{
    PyObject *capsule = PyCapsule_New(managed, "dltensor", free_capsule);
    if (!capsule) {
        free_output(managed);
        return NULL;
    }
    PyObject *tensor = PyObject_CallFunctionObjArgs(torch.from_dlpack, capsule, NULL);
    Py_DECREF(capsule);
    return tensor;
}

PyObject *spar_output_tensor(spar_memory *block, const spar_plan_tensor *tensor, int summed, int dtype)
{
    void *result = NULL;
    if (!block)
        return Py_NewRef(Py_None);
    struct {
        union {
            dl_managed managed;
            dl_versioned versioned;
        };
        int64_t shape[];
    } *made = malloc(sizeof *made + (size_t)tensor->ndim * sizeof *made->shape);
    if (!made) {
        spar_memory_free(block);
        return PyErr_NoMemory();
    }
    dl_tensor output = output_of(block, tensor, summed, dtype, made->shape);
    if (!torch.api) {
        made->managed = (dl_managed){output, block, free_output};
        return import_by_capsule(&made->managed);
    }
    made->versioned = (dl_versioned){
        .version = {DL_MAJOR, 0}, .context = block, .deleter = free_versioned, .tensor = output};
    /* by the specification it steals the tensor: to free it here, where this fails, might free it twice */
    return torch.api->import(&made->versioned, &result) == 0 ? result : NULL;
}
