/* The binding: parse, release the GIL, run, raise. module.c and the files named after what they bind alone know
 * Python; they keep to the limited API of CPython 3.10. Addresses travel as integers. */
#ifndef SPAR_BINDING_H
#define SPAR_BINDING_H

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#include "ipc/group.h"
#include "spar.h"

/* Sets the exception that belongs to a status; returns NULL. */
PyObject *spar_raise(spar_status status);

/* The whole numbers of a tuple; -1 and an exception where it holds something else. */
Py_ssize_t spar_read_ints(PyObject *tuple, int64_t *values, Py_ssize_t room, const char *what);

PyObject *spar_ints_to_tuple(const int64_t *values, Py_ssize_t count);

/* One tensor, as (item size, extents, strides, args); its numbers go into `room`. */
Py_ssize_t spar_count_numbers(PyObject *tuple);
int spar_read_tensor(PyObject *tuple, spar_tensor *tensor, int64_t *room, Py_ssize_t size);

/* A factor, and the type it is fused for. */
int spar_read_scale(int dtype, int divide, double factor, spar_scale *scale);

/* A DLPack capsule of an output in the arena. Takes the block over, also on failure. Items of dtypes that the core
 * does not know are unsigned integers of their size; of 16 bytes, complex. */
PyObject *spar_output_capsule(spar_memory *block, const spar_plan_tensor *tensor, int dtype);

/* The type spar._C.Comm, and its maker. */
PyObject *spar_comm_type(void);
PyObject *spar_py_comm(PyObject *module, PyObject *args);
extern const char spar_py_comm_doc[];

/* Until a deadline in seconds, as time.monotonic counts them; ends at a signal, and when `comm` is closed. */
spar_deadline spar_py_deadline(PyObject *comm, double deadline);

/* Raises as spar_raise does, but for SPAR_INTERRUPTED, where a signal's handler has set an exception. */
PyObject *spar_py_raise_after_wait(spar_status status);

/* Comm.run and Comm.wait, of `self`: calls that go into a device's stream. */
PyObject *spar_py_run(spar_comm *comm, PyObject *self, const char *group, PyObject *args);
PyObject *spar_py_wait(spar_comm *comm, PyObject *self, PyObject *args);
extern const char spar_py_run_doc[];

/* What an op that communicates nothing selects, in memory of the arena. */
PyObject *spar_py_select(PyObject *module, PyObject *args);
extern const char spar_py_select_doc[];

/* The type spar._C.Plan, new; and the function that makes its instances. */
PyObject *spar_plan_type(void);
PyObject *spar_py_plan(PyObject *module, PyObject *args);
extern const char spar_py_plan_doc[];

/* The plan of a spar._C.Plan, which holds it; NULL and an exception for other objects. */
const spar_plan *spar_py_plan_of(PyObject *object);

#endif
