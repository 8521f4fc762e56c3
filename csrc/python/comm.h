/* SPDX-License-Identifier: Apache-2.0 */
/* The object of the type spar._C.Comm, and its methods: comm_type.c has the set-up and what it shows, calls.c
 * its calls, streams.c those that are enqueued in a device's stream. */
#ifndef SPAR_PYTHON_COMM_H
#define SPAR_PYTHON_COMM_H

#include "python/binding.h"

/* What calls that are enqueued use of torch: the arguments of bind_torch, borrowed of `bound`. */
typedef struct {
    PyObject *bound; /* NULL before bind_torch */
    PyObject *index, *enter, *leave, *stream, *empty, *sums, *refuse, *native;
    long ordinal; /* the index */
} spar_py_torch;

typedef struct {
    PyObject_HEAD
    char group[64];   /* for messages */
    int closing;      /* atomic: a call in progress must end */
    int64_t begun;    /* the number of the newest call that the transport has */
    int64_t compared; /* the number of the newest call that comm_compare began */
    spar_comm *comm;
    spar_setup_result setup_result;
    /* Of calls that are enqueued: */
    spar_py_torch torch;
    PyObject *pool; /* what routes torch's allocations to memory that peers write to; NULL: none */
    char inside;    /* whether one is under way */
} comm_object;

/* The communicator of a Comm; NULL and an exception once it was closed. */
spar_comm *spar_py_open_comm(PyObject *self);

/* A deadline in seconds of time.monotonic(); a signal, or closing `comm`, ends the wait, too. */
spar_deadline spar_py_deadline(PyObject *comm, double deadline);

/* Methods of a call. */
PyObject *spar_comm_py_exchange(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
extern const char spar_py_exchange_doc[];
PyObject *spar_comm_py_compare(PyObject *self, PyObject *args);
PyObject *spar_comm_py_poll(PyObject *self, PyObject *args);
PyObject *spar_comm_py_end(PyObject *self, PyObject *unused);
PyObject *spar_comm_py_fail(PyObject *self, PyObject *args);

/* Methods of calls that are enqueued in a device's stream. */
PyObject *spar_comm_py_enqueue(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
extern const char spar_py_enqueue_doc[];
PyObject *spar_comm_py_wait(PyObject *self, PyObject *args);
PyObject *spar_comm_py_bind_torch(PyObject *self, PyObject *args);
extern const char spar_py_bind_torch_doc[];
PyObject *spar_comm_py_pool(PyObject *self, void *closure);
int spar_comm_py_set_pool(PyObject *self, PyObject *pool, void *closure);

#endif
