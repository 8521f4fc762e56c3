/* SPDX-License-Identifier: Apache-2.0 */
/* The rows of an exchange's inputs that an index lists: csrc/devices/execute.h. */
#ifndef SPAR_PYTHON_LISTED_H
#define SPAR_PYTHON_LISTED_H

#include "python/binding.h"

/* The rows of a tensor's first dim that a rank sends, all of them below `end`. */
typedef struct {
    int is_listed; /* 0: all rows, in their order */
    const int64_t *index;
    int64_t count, end;
} spar_py_listed;

/* Reads a tuple that has an index or None for each tensor, and owns the memory. Returns 0, or -1 and an
 * exception. */
int spar_py_read_listed(PyObject *indexes, int ntensors, spar_py_listed *listed);

/* Replaces the numbers of a tensor, its extents and then its strides, by those of its listed rows, one behind
 * the other; returns 0 if it lacks some, or they have gaps. */
int spar_py_list_rows(const spar_py_listed *listed, int64_t item_size, int ndim, int64_t *numbers,
                      spar_rows *rows);

#endif
