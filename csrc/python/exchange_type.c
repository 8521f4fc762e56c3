/* SPDX-License-Identifier: Apache-2.0 */
/* spar._C.Exchange: what all ranks agree on about an exchange, and the newest plan for it. */
#include "python/binding.h"
#include "python/listed.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_KEPT_BYTES = 64 << 10 }; /* larger plans are in the bounded cache alone */

typedef struct {
    PyObject_HEAD
    PyObject *op_object, *text_object; /* they hold the memory of the next two */
    const char *op, *text;
    PyObject *rows_object; /* NULL: no rows are listed; it holds the memory of: */
    spar_py_listed rows[SPAR_GROUP_TENSORS];
    int world, rank, ntensors;
    int64_t item_size;
    int nargs[SPAR_GROUP_TENSORS];
    int64_t *args; /* the tensors' layouts, one behind the other */
    int dtype;     /* a row of spar_scale_types, or 0 */
    spar_scale scale;
    spar_sum_kind sum;
    /* The newest plan, or NULL, and the tensors that it is for: their dims, extents and strides, and their
     * kind, as in spar_py_request. */
    spar_plan *plan;
    int ndims[SPAR_GROUP_TENSORS];
    int64_t *numbers;
    uint64_t kind;
} exchange_object;

static PyTypeObject *exchange_type;

/* ---- making one ---- */

static int read_args(exchange_object *self, PyObject *layouts)
{
    Py_ssize_t count = PyTuple_Check(layouts) ? PyTuple_Size(layouts) : -1, total = 0;
    if (count < 1 || count > SPAR_GROUP_TENSORS) {
        PyErr_Format(PyExc_ValueError, "args of %zd tensors; expected a tuple of 1 to %d", count,
                     SPAR_GROUP_TENSORS);
        return -1;
    }
    for (Py_ssize_t t = 0; t < count; t++) {
        PyObject *each = PyTuple_GetItem(layouts, t);
        if (!PyTuple_Check(each)) {
            PyErr_SetString(PyExc_TypeError, "the args of a tensor must be a tuple");
            return -1;
        }
        total += self->nargs[t] = (int)PyTuple_Size(each);
    }
    self->ntensors = (int)count;
    int64_t *next = self->args = malloc((size_t)total * sizeof *self->args + 1);
    if (!next) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t t = 0; t < count; next += self->nargs[t++])
        if (spar_read_ints(PyTuple_GetItem(layouts, t), next, self->nargs[t]) < 0)
            return -1;
    return 0;
}

static PyObject *exchange_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *op, *text, *layouts, *rows = Py_None;
    int world, rank, divide, dtype, sum;
    long long item_size;
    double factor;
    if (!PyArg_ParseTuple(args, "UUiiLOipdi|O", &op, &text, &world, &rank, &item_size, &layouts, &dtype,
                          &divide, &factor, &sum, &rows))
        return NULL;
    if (sum < SPAR_NO_SUM || sum >= SPAR_SUM_KINDS)
        return PyErr_Format(PyExc_ValueError, "a sum of kind %d; expected 0 to %d", sum, SPAR_SUM_KINDS - 1);
    exchange_object *self = (exchange_object *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->op_object = Py_NewRef(op);
    self->text_object = Py_NewRef(text);
    self->op = PyUnicode_AsUTF8AndSize(op, NULL);
    self->text = PyUnicode_AsUTF8AndSize(text, NULL);
    self->world = world;
    self->rank = rank;
    self->item_size = item_size;
    self->dtype = dtype;
    self->sum = (spar_sum_kind)sum;
    if (self->op && self->text && spar_read_scale(dtype, divide, factor, &self->scale) == 0 &&
        read_args(self, layouts) == 0 &&
        (rows == Py_None || spar_py_read_listed(rows, self->ntensors, self->rows) == 0)) {
        self->rows_object = rows == Py_None ? NULL : Py_NewRef(rows);
        return (PyObject *)self;
    }
    Py_DECREF(self);
    return NULL;
}

static void exchange_dealloc(PyObject *object)
{
    exchange_object *self = (exchange_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->plan)
        spar_plan_release(self->plan);
    free(self->numbers);
    free(self->args);
    Py_XDECREF(self->op_object);
    Py_XDECREF(self->text_object);
    Py_XDECREF(self->rows_object);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* ---- its plan for the tensors of a call ---- */

/* Whether the newest plan is for tensors of these extents, and if `strides` is set of these strides. */
static int is_for(const exchange_object *self, const spar_py_bound *bound, int strides)
{
    const int64_t *next = self->numbers;
    for (int t = 0; self->plan && t < self->ntensors; t++) {
        const spar_tensor *tensor = &bound->tensors[t];
        size_t size = (size_t)tensor->ndim * sizeof *next;
        if (self->ndims[t] != tensor->ndim || memcmp(next, tensor->extents, strides ? 2 * size : size) != 0)
            return 0;
        next += 2 * tensor->ndim;
    }
    return self->plan != NULL;
}

static int has_items(const spar_tensor *tensor)
{
    for (int i = 0; i < tensor->ndim; i++)
        if (tensor->extents[i] == 0)
            return 0;
    return 1;
}

/* Reads the inputs. Copies their numbers: another thread may change a tensor once the GIL is released. */
static int read_inputs(const exchange_object *self, PyObject *inputs, spar_py_bound *bound)
{
    int64_t *numbers = bound->numbers, *args = self->args;
    if (spar_sequence_size(inputs) != self->ntensors) {
        PyErr_Format(PyExc_ValueError, "%zd tensors; expected a tuple or list of %d",
                     spar_sequence_size(inputs), self->ntensors);
        return -1;
    }
    for (int t = 0; t < self->ntensors; args += self->nargs[t++]) {
        spar_py_tensor read;
        if (spar_py_read_tensor(spar_sequence_item(inputs, t), &read, numbers) < 0)
            return -1;
        spar_tensor *tensor = &bound->tensors[t];
        *tensor =
            (spar_tensor){self->item_size, read.ndim, numbers, numbers + read.ndim, self->nargs[t], args};
        if (!spar_py_list_rows(&self->rows[t], self->item_size, read.ndim, numbers, &bound->rows[t])) {
            PyErr_Format(PyExc_ValueError,
                         "%s on rank %d of %d: tensor %d of its inputs lacks rows that are listed, or has "
                         "rows that are not contiguous",
                         self->op, self->rank, self->world, t);
            return -1;
        }
        numbers += read.ndim > SPAR_MAX_DIMS ? 0 : 2 * read.ndim; /* no plan has more */
        bound->inputs[t] = read.address;
        bound->kind = t == 0 || bound->kind == read.kind ? read.kind : 0;
        if (!read.address && read.ndim <= SPAR_MAX_DIMS && has_items(tensor)) {
            PyErr_Format(PyExc_ValueError,
                         "%s on rank %d of %d: tensor %d of its inputs has items but no memory, as after a "
                         "resize of its storage to 0; expected one whose memory is allocated",
                         self->op, self->rank, self->world, t);
            return -1;
        }
    }
    return 0;
}

int spar_py_bind(spar_call *call, PyObject *exchange, PyObject *inputs, int sides, int alike,
                 spar_py_bound *bound)
{
    exchange_object *self = (exchange_object *)exchange;
    bound->call = call;
    bound->exchange = NULL;
    bound->plan = NULL;
    if (Py_TYPE(exchange) != exchange_type) {
        PyErr_SetString(PyExc_TypeError, "expected a spar._C.Exchange");
        return -1;
    }
    bound->exchange = Py_NewRef(exchange);
    bound->request = (spar_request){self->world, self->rank, sides, self->ntensors, bound->tensors};
    bound->dtype = self->dtype;
    call->op = self->op;
    call->text = self->text;
    call->scale = self->scale;
    call->sum = self->sum;
    call->inputs = (const void *const *)bound->inputs;
    call->rows = self->rows_object ? bound->rows : NULL;
    if (read_inputs(self, inputs, bound) < 0) {
        if (!alike || !PyErr_ExceptionMatches(PyExc_Exception)) /* not Ctrl-C, which came meanwhile */
            return -1;
        PyErr_Clear();
        return 1;
    }
    if (alike && (!bound->kind || bound->kind != self->kind || !is_for(self, bound, 0)))
        return 1;
    if (is_for(self, bound, 1) && (!sides || self->plan->pull))
        bound->plan = spar_plan_keep(self->plan);
    return 0;
}

/* Remembers the plan, unless it takes much memory. */
static void keep(exchange_object *self, const spar_py_bound *bound)
{
    size_t count = 0;
    for (int t = 0; t < self->ntensors; t++)
        count += 2 * (size_t)bound->tensors[t].ndim;
    int64_t *numbers = bound->plan->footprint > MOST_KEPT_BYTES ? NULL : malloc(count * sizeof *numbers + 1);
    if (!numbers)
        return;
    memcpy(numbers, bound->numbers, count * sizeof *numbers);
    free(self->numbers);
    self->numbers = numbers;
    self->kind = bound->kind;
    for (int t = 0; t < self->ntensors; t++)
        self->ndims[t] = bound->tensors[t].ndim;
    if (self->plan)
        spar_plan_release(self->plan);
    self->plan = spar_plan_keep(bound->plan);
}

spar_status spar_py_find_plan(spar_py_bound *bound)
{
    spar_status status = SPAR_OK;
    if (!bound->plan) {
        Py_BEGIN_ALLOW_THREADS;
        status = spar_plan_get(&bound->request, &bound->plan);
        Py_END_ALLOW_THREADS;
        if (status == SPAR_OK)
            keep((exchange_object *)bound->exchange, bound);
        else
            spar_fail(status, "%s: %s", bound->call->op, spar_last_error());
    }
    bound->call->plan = bound->plan;
    return status;
}

void spar_py_unbind(spar_py_bound *bound)
{
    if (bound->plan)
        spar_plan_release(bound->plan);
    Py_XDECREF(bound->exchange);
}

/* ---- methods ---- */

/* Binds the tensors and finds their plan; returns as spar_py_bind. Unbind in all cases. */
static int plan_inputs(spar_call *call, PyObject *self, PyObject *inputs, int sides, int alike,
                       spar_py_bound *bound)
{
    int other = spar_py_bind(call, self, inputs, sides, alike, bound);
    if (other)
        return other;
    if (call->rows) {
        PyErr_SetString(PyExc_ValueError, "rows are listed; expected a channel that reads those");
        return -1;
    }
    spar_status status = spar_py_find_plan(bound);
    if (status != SPAR_OK)
        spar_raise(status);
    return status == SPAR_OK ? 0 : -1;
}

PyDoc_STRVAR(
    plan_doc,
    "plan(inputs, sides, alike=False) -> (Plan, addresses of the inputs)\n\n"
    "inputs: a tuple or list of tensors. sides: SIDE_PULL where packed bytes arrive. alike: return None\n"
    "unless they have the dtype, device and extents of those of the newest plan.");

static PyObject *exchange_plan(PyObject *self, PyObject *args)
{
    PyObject *inputs, *result = NULL;
    int sides, alike = 0;
    spar_call call = {0};
    spar_py_bound bound;
    if (!PyArg_ParseTuple(args, "Oi|p", &inputs, &sides, &alike))
        return NULL;
    int other = plan_inputs(&call, self, inputs, sides, alike, &bound);
    if (other > 0) {
        result = Py_NewRef(Py_None);
    } else if (other == 0) {
        int count = bound.plan->ntensors;
        PyObject *addresses = PyTuple_New(count);
        for (int t = 0; addresses && t < count; t++)
            addresses = spar_tuple_set(addresses, t, PyLong_FromVoidPtr(bound.inputs[t]));
        result = addresses ? Py_BuildValue("NN", spar_py_plan_object(bound.plan), addresses) : NULL;
    }
    spar_py_unbind(&bound);
    return result;
}

PyDoc_STRVAR(
    select_doc,
    "select(inputs) -> the output\n\n"
    "inputs: a tuple of one tensor that every rank holds whole. None where there is no arena, or half\n"
    "of it is in use: exchanges need the rest.");

static PyObject *exchange_select(PyObject *self, PyObject *inputs)
{
    PyObject *result = NULL;
    spar_arena_stats stats;
    spar_memory *block = NULL;
    spar_call call = {0};
    spar_py_bound bound;
    if (plan_inputs(&call, self, inputs, 0, 0, &bound) != 0)
        goto done;
    if (bound.plan->ntensors != 1) {
        PyErr_Format(PyExc_ValueError, "%d tensors; expected 1", bound.plan->ntensors);
        goto done;
    }
    const spar_plan_tensor *tensor = &bound.plan->tensors[0];
    Py_BEGIN_ALLOW_THREADS;
    spar_arena_read_stats(&stats);
    if (spar_arena_is_own() && tensor->out_bytes <= stats.cap / 2 - stats.allocated &&
        spar_arena_take(tensor->out_bytes, &block) == SPAR_OK) {
        void *output = spar_memory_address(block);
        spar_copy_own(bound.plan, call.inputs, &output, &call.scale);
    }
    Py_END_ALLOW_THREADS;
    result = spar_output_tensor(block, tensor, 0, bound.dtype);
done:
    spar_py_unbind(&bound);
    return result;
}

PyDoc_STRVAR(
    exchange_type_doc,
    "Exchange(op, text, world, rank, item size, args, scale_type, divide, factor, sum_kind, rows=None)\n\n"
    "What all ranks agree on about an exchange of tensors of one dtype. It keeps the newest plan.\n\n"
    "op: a name for messages. text: what must be equal on all ranks besides the plan. args: a tuple\n"
    "of each tensor's layouts. scale_type 0: the outputs are of unsigned integers, unscaled.\n"
    "sum_kind: 0, or of sum_types: the outputs' first dim has a row for each rank, and is summed.\n"
    "rows: None, or a tuple with an int64 index for each input, or None: its rows of dim 0 that are sent,\n"
    "in the order of args, by which each rank sends another at most one run of them.");

static PyObject *exchange_op(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(((exchange_object *)self)->op_object);
}

static PyObject *exchange_text(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(((exchange_object *)self)->text_object);
}

static PyObject *exchange_sums(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((exchange_object *)self)->sum != SPAR_NO_SUM);
}

static PyObject *exchange_scale(PyObject *object, void *Py_UNUSED(closure))
{
    const spar_scale *scale = &((exchange_object *)object)->scale;
    return Py_BuildValue("iNd", (int)scale->dtype, PyBool_FromLong(scale->divide), scale->factor);
}

static PyObject *exchange_newest(PyObject *object, void *Py_UNUSED(closure))
{
    const exchange_object *self = (exchange_object *)object;
    return self->plan ? spar_py_plan_object(self->plan) : Py_NewRef(Py_None);
}

static PyGetSetDef exchange_getset[] = {
    {"op", exchange_op, NULL, "the operation's name", NULL},
    {"text", exchange_text, NULL, "what must be equal on all ranks besides the plan", NULL},
    {"sums", exchange_sums, NULL, "whether the outputs are summed over their first dim", NULL},
    {"scale", exchange_scale, NULL, "(scale_type, divide, factor); 0: it scales nothing", NULL},
    {"newest", exchange_newest, NULL, "the newest plan, from its call's begin on; None: none, or it is large",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef exchange_methods[] = {
    {"plan", exchange_plan, METH_VARARGS, plan_doc},
    {"select", exchange_select, METH_O, select_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot exchange_slots[] = {
    {Py_tp_doc, (void *)exchange_type_doc}, {Py_tp_new, exchange_new},
    {Py_tp_dealloc, exchange_dealloc},      {Py_tp_getset, exchange_getset},
    {Py_tp_methods, exchange_methods},      {0, NULL},
};

static PyType_Spec exchange_spec = {
    .name = "spar._C.Exchange",
    .basicsize = sizeof(exchange_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = exchange_slots,
};

PyObject *spar_exchange_type(void)
{
    exchange_type = (PyTypeObject *)PyType_FromSpec(&exchange_spec);
    return (PyObject *)exchange_type;
}
