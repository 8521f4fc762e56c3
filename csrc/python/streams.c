/* Calls of a spar._C.Comm that are enqueued in a device's stream; torch allocates their outputs. */
#include "python/binding.h"

/* Reads a plan, and the addresses of its tensors; NULL and an exception on failure. */
static const spar_plan *read_tensors(PyObject *object, PyObject *from, const void **inputs, PyObject *to,
                                     void **outputs)
{
    const spar_plan *plan = spar_py_plan_in(object);
    if (plan && plan->ntensors > SPAR_GROUP_TENSORS) {
        PyErr_Format(PyExc_ValueError, "a plan of %d tensors; expected at most %d", plan->ntensors,
                     SPAR_GROUP_TENSORS);
        return NULL;
    }
    if (!plan || spar_read_addresses(from, (void **)inputs, plan->ntensors, "inputs") < 0 ||
        spar_read_addresses(to, outputs, plan->ntensors, "outputs") < 0)
        return NULL;
    return plan;
}

const char spar_py_staging_doc[] = PyDoc_STR(
    "staging(plan, inputs, outputs, scale_type, divide, factor) -> bytes\n\n"
    "Of device memory that run needs for this call: allocate it in the order of the call's stream, in which\n"
    "it may be freed when run has returned.");

PyObject *spar_py_staging(spar_comm *comm, PyObject *args)
{
    PyObject *object, *from, *to;
    const void *inputs[SPAR_GROUP_TENSORS];
    void *outputs[SPAR_GROUP_TENSORS];
    int dtype, divide;
    double factor;
    int64_t bytes = 0;
    spar_call call = {.inputs = inputs, .outputs = outputs};
    if (!PyArg_ParseTuple(args, "OOOipd", &object, &from, &to, &dtype, &divide, &factor) ||
        spar_read_scale(dtype, divide, factor, &call.scale) < 0 ||
        !(call.plan = read_tensors(object, from, inputs, to, outputs)))
        return NULL;
    spar_status status = SPAR_OK;
    Py_BEGIN_ALLOW_THREADS;
    if (comm->transport->staging)
        status = comm->transport->staging(comm, &call, &bytes);
    Py_END_ALLOW_THREADS;
    return status == SPAR_OK ? PyLong_FromLongLong((long long)bytes) : spar_raise(status);
}

const char spar_py_run_doc[] = PyDoc_STR(
    "run(op, plan, inputs, outputs, staging, stream, native, scale_type, divide, factor, text, deadline)\n\n"
    "One exchange, given to the stream: returns before its bytes have moved. Addresses are ints, inputs and\n"
    "outputs tuples of them; staging: of memory as staging() says; native as of comm(), now.");

PyObject *spar_py_run(spar_comm *comm, PyObject *self, const char *group, PyObject *args)
{
    PyObject *object, *from, *to;
    const char *op, *text;
    const void *inputs[SPAR_GROUP_TENSORS];
    void *outputs[SPAR_GROUP_TENSORS];
    unsigned long long staging, stream, native;
    int dtype, divide;
    double factor, deadline_s;
    spar_scale scale;
    if (!PyArg_ParseTuple(args, "sOOOKKKipdsd", &op, &object, &from, &to, &staging, &stream, &native, &dtype,
                          &divide, &factor, &text, &deadline_s) ||
        spar_read_scale(dtype, divide, factor, &scale) < 0)
        return NULL;
    const spar_plan *plan = read_tensors(object, from, inputs, to, outputs);
    if (!plan)
        return NULL;
    spar_call call = {.plan = plan,
                      .inputs = inputs,
                      .outputs = outputs,
                      .device = &spar_device_cuda,
                      .scale = scale,
                      .text = text,
                      .stream = (void *)(uintptr_t)stream,
                      .native = (void *)(uintptr_t)native,
                      .staging = (void *)(uintptr_t)staging,
                      .deadline = spar_py_deadline(self, deadline_s),
                      .group = group,
                      .op = op};
    spar_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = spar_comm_run(comm, &call);
    Py_END_ALLOW_THREADS;
    return spar_result(status);
}

PyObject *spar_py_wait(spar_comm *comm, PyObject *self, PyObject *args)
{
    double deadline_s;
    if (!PyArg_ParseTuple(args, "d", &deadline_s))
        return NULL;
    if (!comm->transport->wait)
        Py_RETURN_NONE; /* its calls return once they have ended */
    spar_deadline deadline = spar_py_deadline(self, deadline_s);
    spar_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = comm->transport->wait(comm, &deadline);
    Py_END_ALLOW_THREADS;
    return spar_result(status);
}
