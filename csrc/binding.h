/* The binding: parse, release the GIL, run, raise. module.c and plan_object.c alone know Python; they keep to
 * the limited API of CPython 3.10. Addresses travel as integers. */
#ifndef SPAR_BINDING_H
#define SPAR_BINDING_H

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#include "spar.h"

/* Sets the exception that belongs to a status; returns NULL. */
PyObject *spar_raise(spar_status status);

/* The type spar._C.Plan, new; and the function that makes its instances. */
PyObject *spar_plan_type(void);
PyObject *spar_py_plan(PyObject *module, PyObject *args);
extern const char spar_py_plan_doc[];

#endif
