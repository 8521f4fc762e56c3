#include "layout.h"

#include <stdlib.h>
#include <string.h>

int64_t spar_share(int64_t total, int world, int rank)
{
    return total / world + (rank < total % world);
}

spar_status spar_layout_cut(spar_layout *layout, int dim, int64_t total, int world,
                            const int64_t *sizes)
{
    memset(layout, 0, sizeof *layout);
    layout->dim = dim;
    layout->world = world;
    layout->total = total;
    layout->first = malloc(((size_t)world + 1) * sizeof *layout->first);
    layout->pieces = malloc((size_t)world * sizeof *layout->pieces);
    if (!layout->first || !layout->pieces) {
        spar_layout_free(layout);
        return spar_fail(SPAR_NO_MEMORY, "no memory for a layout of %d ranks", world);
    }
    int64_t start = 0;
    for (int rank = 0; rank < world; rank++) {
        int64_t extent = sizes ? sizes[rank] : spar_share(total, world, rank);
        if (extent < 0 || extent > total - start) {
            spar_layout_free(layout);
            return spar_fail(
                SPAR_INVALID,
                "the size of rank %d's piece is %lld; expected sizes of at least 0 that "
                "sum to %lld",
                rank, (long long)extent, (long long)total);
        }
        layout->first[rank] = rank;
        layout->pieces[rank] = (spar_piece){.local = 0, .global = start, .extent = extent};
        start += extent;
    }
    layout->first[world] = world;
    if (start != total) {
        spar_layout_free(layout);
        return spar_fail(SPAR_INVALID, "the sizes sum to %lld; expected %lld", (long long)start,
                         (long long)total);
    }
    return SPAR_OK;
}

void spar_layout_whole(spar_layout *layout, int world)
{
    memset(layout, 0, sizeof *layout);
    layout->dim = -1;
    layout->world = world;
}

int64_t spar_layout_extent(const spar_layout *layout, int rank)
{
    int64_t extent = 0;
    for (int64_t i = layout->first[rank]; i < layout->first[rank + 1]; i++)
        extent += layout->pieces[i].extent;
    return extent;
}

void spar_layout_free(spar_layout *layout)
{
    free(layout->first);
    free(layout->pieces);
    layout->first = NULL;
    layout->pieces = NULL;
}
