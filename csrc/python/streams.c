/* Calls of a spar._C.Comm that are enqueued in a device's stream; torch allocates their outputs. */
#include "python/binding.h"

const char spar_py_run_doc[] = PyDoc_STR(
    "run(op, plan, inputs, outputs, stream, native, scale_type, divide, factor, text, deadline)\n\n"
    "One exchange, given to the stream: returns before its bytes have moved. Addresses are ints, inputs and\n"
    "outputs tuples of them; native as of comm(), now.");

PyObject *spar_py_run(spar_comm *comm, PyObject *self, const char *group, PyObject *args)
{
    PyObject *object, *from, *to;
    const char *op, *text;
    const void *inputs[SPAR_GROUP_TENSORS];
    void *outputs[SPAR_GROUP_TENSORS];
    unsigned long long stream, native;
    int dtype, divide;
    double factor, deadline_s;
    spar_scale scale;
    if (!PyArg_ParseTuple(args, "sOOOKKipdsd", &op, &object, &from, &to, &stream, &native, &dtype, &divide,
                          &factor, &text, &deadline_s) ||
        spar_read_scale(dtype, divide, factor, &scale) < 0)
        return NULL;
    const spar_plan *plan = spar_py_plan_of(object);
    if (!plan)
        return NULL;
    if (plan->ntensors > SPAR_GROUP_TENSORS)
        return PyErr_Format(PyExc_ValueError, "a plan of %d tensors; expected at most %d", plan->ntensors,
                            SPAR_GROUP_TENSORS);
    if (spar_read_addresses(from, (void **)inputs, plan->ntensors, "inputs") < 0 ||
        spar_read_addresses(to, outputs, plan->ntensors, "outputs") < 0)
        return NULL;
    spar_call call = {.plan = plan,
                      .inputs = inputs,
                      .outputs = outputs,
                      .device = &spar_device_cuda,
                      .scale = scale,
                      .text = text,
                      .stream = (void *)(uintptr_t)stream,
                      .native = (void *)(uintptr_t)native,
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
