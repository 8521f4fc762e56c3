/* SPDX-License-Identifier: Apache-2.0 */
#include "python/listed.h"

static int read_index(PyObject *index, spar_py_listed *listed)
{
    int64_t numbers[2 * SPAR_MAX_DIMS];
    spar_py_tensor read;
    if (spar_py_read_tensor(index, &read, numbers) < 0)
        return -1;
    if (read.ndim != 1 || (numbers[0] > 1 && numbers[1] != 1)) {
        PyErr_SetString(PyExc_ValueError, "an index of rows must have one dim, and be contiguous");
        return -1;
    }
    *listed = (spar_py_listed){1, read.address, numbers[0], 0};
    for (int64_t i = 0; i < listed->count; i++) {
        int64_t row = listed->index[i];
        if (row < 0 || row == INT64_MAX) {
            PyErr_Format(PyExc_ValueError, "row %lld; expected at least 0", (long long)row);
            return -1;
        }
        listed->end = row < listed->end ? listed->end : row + 1;
    }
    return 0;
}

int spar_py_read_listed(PyObject *indexes, int ntensors, spar_py_listed *listed)
{
    if (!PyTuple_Check(indexes) || PyTuple_Size(indexes) != ntensors) {
        PyErr_Format(PyExc_ValueError, "rows must be a tuple of %d indexes, or None", ntensors);
        return -1;
    }
    for (int t = 0; t < ntensors; t++) {
        PyObject *index = PyTuple_GetItem(indexes, t);
        if (index != Py_None && read_index(index, &listed[t]) < 0)
            return -1;
    }
    return 0;
}

int spar_py_list_rows(const spar_py_listed *listed, int64_t item_size, int ndim, int64_t *numbers,
                      spar_rows *rows)
{
    int64_t items = 1;
    int has_gaps = 0;
    *rows = (spar_rows){0};
    if (!listed->is_listed)
        return 1;
    if (ndim < 1 || ndim > SPAR_MAX_DIMS || listed->end > numbers[0])
        return 0;
    for (int i = ndim - 1; i > 0; i--) {
        has_gaps |= numbers[i] > 1 && numbers[ndim + i] != items;
        items *= numbers[i];
    }
    if (has_gaps && items > 0 && listed->count > 0)
        return 0;
    *rows = (spar_rows){listed->index, items * item_size, numbers[ndim] * item_size};
    numbers[0] = listed->count;
    numbers[ndim] = items;
    return 1;
}
