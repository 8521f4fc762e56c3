/* The op table. An operation turns its arguments into two layouts of one global tensor: see layout.h.
 *
 * To add one, write a file in ops/ (or a function in its family's file) and add a row to table.c. Shapes, plans,
 * signatures, transports and tests follow from the two layouts. */
#ifndef SPAR_OPS_TABLE_H
#define SPAR_OPS_TABLE_H

#include "ops/layout.h"

#define SPAR_MAX_DIMS 64 /* as many as torch allows */

/* One tensor of a request, as one rank sees it. */
typedef struct {
    int64_t item_size;      /* bytes of an element */
    int ndim;               /* 1 to SPAR_MAX_DIMS */
    const int64_t *extents; /* [ndim] of this rank's input, in elements */
    const int64_t *strides; /* [ndim] of this rank's input, in elements, at least 0 */
    int nargs;              /* the op's own arguments: see its row */
    const int64_t *args;
} spar_tensor;

typedef struct spar_op {
    const char *name;
    const char *inverse; /* the op that undoes this one, and carries its gradient back */
    const char *args;    /* what spar_tensor.args holds, for messages and documents */
    /* Checks args against the extents that `rank` holds, and fills in the global extents [ndim] and both
     * layouts. On failure it leaves no layout to free. */
    spar_status (*layouts)(const struct spar_op *op, const spar_tensor *tensor, int world, int rank,
                           int64_t *global, spar_layout *in, spar_layout *out);
} spar_op;

/* NULL-terminated. */
extern const spar_op *const spar_ops[];

/* Returns the op; if there is none, NULL and an error that lists the known names. */
const spar_op *spar_op_find(const char *name);

/* The rows; one file in ops/ per family. */
extern const spar_op spar_op_all_to_all, spar_op_split, spar_op_gather;
extern const spar_op spar_op_zigzag_split, spar_op_zigzag_gather;
extern const spar_op spar_op_packed_split, spar_op_packed_gather;

/* For rows: reads dim `args[which]` and checks it against ndim. */
spar_status spar_op_dim(const spar_op *op, const spar_tensor *tensor, int which, int *dim);

/* For rows: checks that `args[which]`, the number of inner ranks, divides world. */
spar_status spar_op_inner(const spar_op *op, const spar_tensor *tensor, int which, int world);

/* For rows with one whole side and one sharded side (`in` if the op gathers), whose layout is set already. Checks that
 * `rank` holds its shard, and sets the whole layout and the global extents. Frees the layout on failure. */
spar_status spar_op_shard(const spar_op *op, const spar_tensor *tensor, int rank, int64_t *global,
                          int gathers, spar_layout *in, spar_layout *out);

#endif
