/* SPDX-License-Identifier: Apache-2.0 */
/* What the view (spar/_model) does for each torch function: call_key.c tells calls apart, mode_type.c runs
 * those that are known. */
#ifndef SPAR_PYTHON_VIEW_H
#define SPAR_PYTHON_VIEW_H

#include "python/binding.h"

/* What the view uses of torch and of its own Python code. */
typedef struct {
    PyObject *tensor, *parameter, *size; /* types */
    PyObject *values;                    /* a tuple of types whose objects are in keys as they are */
    PyObject *has_part;                  /* has_part(x) -> whether an object of another type holds a part */
    PyObject *level;                     /* level() -> the level of torch.func's transforms, or None */
    PyObject *getattr;                   /* the builtin, which finds no attribute without an exception */
    PyObject *shard;                     /* the name of a part's attribute */
    PyObject *has_mode;                  /* has_mode() -> whether torch calls a mode */
    PyObject *pop_mode, *push_mode;      /* the innermost mode off torch's stack, and onto it */
    PyObject *handle;                    /* torch.overrides.handle_torch_function */
    /* Strings: */
    PyObject *shape, *start, *stop, *step, *call, *finish, *is_true, *is_false, *is_zero, *place, *code;
} spar_view_uses;

/* NULL and an exception before spar_py_use_view. */
const spar_view_uses *spar_py_view_uses(void);

/* Whether x is a torch.Tensor or a Parameter, and of no subclass, which may store attributes otherwise. */
int spar_py_is_tensor(const spar_view_uses *uses, PyObject *x);

PyObject *spar_py_use_view(PyObject *module, PyObject *args);
extern const char spar_py_use_view_doc[];

/* Gives a place another object, which it owns, in the place of what it owned. */
void spar_py_set_to(PyObject **at, PyObject *made);

/* Puts values in the place of arguments, which are owned. pairs: of a position or a name, and a value. */
int spar_py_replace(PyObject *pairs, PyObject **args, PyObject **kwargs);

/* Says what a result is: `result` is its shard, a list of those of several, or None if all are whole. */
int spar_py_mark(const spar_view_uses *uses, PyObject *out, PyObject *result);

/* The type spar._C.Mode, and the functions of the module beside it. */
PyObject *spar_mode_type(void);
extern PyMethodDef spar_py_view_methods[];

/* What tells a call from those that run otherwise. */
typedef struct {
    PyObject *key;    /* a tuple; NULL where none can */
    int has_part;     /* whether an argument is a part, or holds one */
    int has_tensor;   /* whether an argument is a tensor */
    uint64_t weights; /* which parameters of the model are among them: their attributes _spar_place */
} spar_call_key;

/* Finds the key of a call; kwargs may be NULL. Returns 0, or -1 and an exception, and then no key. */
int spar_py_call_key(const spar_view_uses *uses, PyObject *func, PyObject *args, PyObject *kwargs,
                     spar_call_key *result);

#endif
