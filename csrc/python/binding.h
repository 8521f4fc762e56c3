/* SPDX-License-Identifier: Apache-2.0 */
/* The binding: parse, release the GIL, run, raise. Only this folder includes Python.h; it uses the limited
 * API of CPython 3.10. Addresses are passed as ints. */
#ifndef SPAR_BINDING_H
#define SPAR_BINDING_H

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#include "control/control.h"
#include "spar.h"

/* Sets the exception that belongs to a status, but keeps a signal handler's for SPAR_INTERRUPTED; returns
 * NULL. */
PyObject *spar_raise(spar_status status);

/* The name of the exception that belongs to a status; NULL for SPAR_OK, and for what is no status. */
const char *spar_exception_name(uint32_t status);

/* None, or NULL and the exception of a status. */
PyObject *spar_result(spar_status status);

/* Decodes a text that another process may have written: it may hold any bytes, and be cut within a
 * character. */
PyObject *spar_text(const char *text);

/* Appends to a list, or sets an entry of a tuple. Takes over the item; if it is NULL, or on failure, frees
 * the list or tuple and returns NULL. */
PyObject *spar_list_add(PyObject *list, PyObject *item);
PyObject *spar_tuple_set(PyObject *tuple, Py_ssize_t i, PyObject *item);

PyObject *spar_ints_to_tuple(const int64_t *values, Py_ssize_t count);

/* Reads the ints of a tuple that has `count`; -1 and an exception for other values. */
int spar_read_ints(PyObject *tuple, int64_t *values, Py_ssize_t count);

/* Of a tuple or list: its size, -1 for another object; and a borrowed item. */
Py_ssize_t spar_sequence_size(PyObject *sequence);
PyObject *spar_sequence_item(PyObject *sequence, Py_ssize_t i);

/* What a torch tensor holds, valid as long as nothing runs that may change the tensor. */
typedef struct {
    void *address;
    int ndim;
    uint64_t kind; /* of its dtype and device; 0: not known, or no strided tensor */
} spar_py_tensor;

/* Reads a tensor; copies its extents, and then its strides, to `numbers` [2 * SPAR_MAX_DIMS], unless it has
 * more dims. Returns 0, or -1 and an exception. */
int spar_py_read_tensor(PyObject *tensor, spar_py_tensor *result, int64_t *numbers);

/* Finds the index of a tensor's device; kind: the tensor's, as it was read. Returns 0, or -1 and an
 * exception. */
int spar_py_ordinal(PyObject *tensor, uint64_t kind, int *ordinal);

/* Stores the address of a tensor's first item; returns 0, or -1 and an exception. */
int spar_py_address(PyObject *tensor, void **address);

/* torch.uint8; borrowed. */
PyObject *spar_py_byte_dtype(void);

/* What the binding uses of torch. */
PyObject *spar_py_use_torch(PyObject *module, PyObject *args);
extern const char spar_py_use_torch_doc[];

/* Reads a factor and the dtype for which it is fused. */
int spar_read_scale(int dtype, int divide, double factor, spar_scale *scale);

/* Makes a tensor of an output in the arena; None without a block. It owns the block, also on failure.
 * Items of dtypes that the core does not know become unsigned integers of their size, or complex ones if they
 * have 16 bytes. summed: 1 if the output is a sum over the tensor's first dim, else 0. */
PyObject *spar_output_tensor(spar_memory *block, const spar_plan_tensor *tensor, int summed, int dtype);

/* (text, (rest, dim, size)): see spar_gathered_size. */
PyObject *spar_py_description(const spar_description *description);

/* The type spar._C.Comm, and its maker. */
PyObject *spar_comm_type(void);
PyObject *spar_py_comm(PyObject *module, PyObject *args);
extern const char spar_py_comm_doc[];

/* A copy of the ranks' peer infos, whose bytes may not be aligned; NULL and an exception on failure. */
spar_peer_info *spar_py_peer_infos(const char *bytes, Py_ssize_t size);

/* Functions of the module for the set-up of groups. */
extern PyMethodDef spar_py_setup_methods[];

/* The types spar._C.Plan and spar._C.Exchange. */
PyObject *spar_plan_type(void);
PyObject *spar_exchange_type(void);

/* Makes a spar._C.Plan, which holds the plan, too. */
PyObject *spar_py_plan_object(spar_plan *plan);
const spar_plan *spar_py_plan_of(PyObject *plan); /* NULL and an exception for another object */

/* An exchange, bound to the tensors of one call. */
typedef struct {
    spar_call *call; /* the caller's: binding fills in what the exchange knows of it, and the inputs */
    PyObject *exchange;
    spar_request request; /* for the tensors: */
    spar_tensor tensors[SPAR_GROUP_TENSORS];
    int64_t numbers[SPAR_GROUP_TENSORS * 2 * SPAR_MAX_DIMS];
    uint64_t kind; /* of all tensors; 0: not known, or they differ */
    spar_plan *plan;
    int dtype; /* the exchange's row of spar_scale_types; 0: none */
    void *inputs[SPAR_GROUP_TENSORS];
    spar_rows rows[SPAR_GROUP_TENSORS];
} spar_py_bound;

/* Binds a spar._C.Exchange to a tuple or list of tensors, and takes its newest plan if that is for their
 * extents and strides. Returns 0; 1 if `alike` is set, and the tensors have not the dtype, device and extents
 * of those of the newest plan; or -1 and an exception. Call spar_py_unbind in all cases. */
int spar_py_bind(spar_call *call, PyObject *exchange, PyObject *inputs, int sides, int alike,
                 spar_py_bound *bound);

/* Finds or builds the plan, without the GIL, and remembers it as the exchange's newest. */
spar_status spar_py_find_plan(spar_py_bound *bound);

/* Releases what is bound. */
void spar_py_unbind(spar_py_bound *bound);

#endif
