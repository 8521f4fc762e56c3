/* SPDX-License-Identifier: Apache-2.0 */
/* What runs the calls of a group one at a time: turn_type.c has a call's turn, repeated.c finds the exchange
 * of a call that was made before. */
#ifndef SPAR_PYTHON_TURN_H
#define SPAR_PYTHON_TURN_H

#include "python/binding.h"

/* The objects that a turn holds, by their attributes; NULL and None are the same. */
#define SPAR_TURN_OBJECTS(X)                                                                                 \
    X(broken, "broken")                                                                                      \
    X(timeout, "timeout")                                                                                    \
    X(queue, "queue")                                                                                        \
    X(view, "view")                                                                                          \
    X(newest, "newest")                                                                                      \
    X(channels, "channels")                                                                                  \
    X(exchanges, "exchanges")                                                                                \
    X(process_group, "_process_group")                                                                       \
    X(registry, "_registry")                                                                                 \
    X(acquire, "_acquire")                                                                                   \
    X(release, "_release")                                                                                   \
    X(is_profiled, "_is_profiled")

typedef struct {
    PyObject_HEAD
    long long calls;
    long process;
    unsigned long owner; /* the thread whose call it is, or 0 */
    int progress;
    char closes, logs_calls;
#define SPAR_TURN_FIELD(field, name) PyObject *field;
    SPAR_TURN_OBJECTS(SPAR_TURN_FIELD)
#undef SPAR_TURN_FIELD
} spar_turn;

/* The arguments of a turn's `exchange`, in their order. */
enum {
    SPAR_TURN_OP,
    SPAR_TURN_DEVICE,
    SPAR_TURN_CORE,
    SPAR_TURN_INPUTS,
    SPAR_TURN_OUTS,
    SPAR_TURN_FORWARD,
    SPAR_TURN_ALIKE,
    SPAR_TURN_QUEUED,
    SPAR_TURN_ACTION,
    SPAR_TURN_ARGUMENTS
};

/* The type spar._C.Turn. */
PyObject *spar_turn_type(void);

/* The turn that an object is; NULL and an exception for other objects. */
spar_turn *spar_py_turn_of(PyObject *object);

/* Does what the method `exchange` does, for borrowed arguments of which none is left out. */
PyObject *spar_py_take_turn(PyObject *turn, PyObject *const *args);

/* How many calls there are, those in flight included; -1 and an exception on failure. */
long long spar_py_turn_count(PyObject *turn);

/* Functions of the module for repeated calls. */
extern PyMethodDef spar_py_repeated_methods[];

#endif
