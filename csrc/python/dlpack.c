/* Outputs in shared memory, handed to Python as DLPack capsules. */
#include "python/binding.h"

#include <stdlib.h>
#include <string.h>

/* The layout of DLPack's specification, version 0. */
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

enum { DL_CPU = 1, DL_UINT = 1, DL_COMPLEX = 5 };

/* Runs on any thread, without the GIL, even after the interpreter has ended. */
static void free_output(dl_managed *managed)
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

PyObject *spar_output_capsule(spar_memory *block, const spar_plan_tensor *tensor, int summed, int dtype)
{
    if (!block)
        return Py_NewRef(Py_None);
    int ndim = tensor->ndim - summed;
    size_t extents = (size_t)ndim * sizeof(int64_t);
    dl_managed *managed = malloc(sizeof *managed + extents);
    if (!managed) {
        spar_memory_free(block);
        return PyErr_NoMemory();
    }
    memset(managed, 0, sizeof *managed);
    managed->context = block;
    managed->deleter = free_output;
    managed->tensor.data = spar_memory_address(block);
    managed->tensor.device.type = DL_CPU;
    managed->tensor.ndim = ndim;
    managed->tensor.dtype.code = dtype                     ? spar_scale_types[dtype].dlpack_code
                                 : tensor->item_size == 16 ? DL_COMPLEX
                                                           : DL_UINT;
    managed->tensor.dtype.bits = (uint8_t)(tensor->item_size * 8);
    managed->tensor.dtype.lanes = 1;
    managed->tensor.shape = (int64_t *)(managed + 1);
    memcpy(managed->tensor.shape, tensor->out + summed, extents);
    PyObject *capsule = PyCapsule_New(managed, "dltensor", free_capsule);
    if (!capsule)
        free_output(managed);
    return capsule;
}
