/* SPDX-License-Identifier: Apache-2.0 */
/* Describes plans in messages. */
#include "plan/plan.h"

#include "base/util.h"
#include "plan/place.h"

#include <stdio.h>
#include <string.h>

static void put_list(char *text, size_t size, const int64_t *values, int count)
{
    for (int i = 0; i < count; i++)
        if (!spar_append(text, size, "%s%lld", i ? ", " : "[", (long long)values[i]))
            return;
    spar_append(text, size, "]");
}

static void put_layout(char *text, size_t size, int dim, const int64_t *sizes, int world, const char *words)
{
    if (dim < 0) {
        spar_append(text, size, "whole");
        return;
    }
    spar_append(text, size, "dim %d in ", dim);
    put_list(text, size, sizes, world);
    if (*words)
        spar_append(text, size, " (%s)", words);
}

spar_gathered_size spar_plan_gathered(const spar_plan *plan, const char *text)
{
    const spar_plan_tensor *first = &plan->tensors[0];
    const spar_gathered_size none = {0};
    uint64_t hash = spar_hash(plan->ntensors, first->in_dim);
    for (int t = 0; t < plan->ntensors; t++) {
        const spar_plan_tensor *shape = &plan->tensors[t];
        if (shape->in_dim < 0 || shape->in_dim == shape->out_dim || shape->in_order || shape->out_order ||
            shape->in_dim != first->in_dim)
            return none;
        hash = spar_hash(hash, shape->out_dim);
        for (int rank = 0; rank < plan->world; rank++) {
            if (shape->in_sizes[rank] != first->in_sizes[0])
                return none;
            hash = spar_hash(hash, shape->out_dim < 0 ? 0 : shape->out_sizes[rank]);
        }
        for (int i = 0; i < shape->ndim; i++)
            hash = spar_hash(hash, i == shape->in_dim ? 0 : shape->global[i]);
    }
    for (; *text; text++)
        hash = spar_hash(hash, *text);
    return (spar_gathered_size){(int64_t)(hash | 1), first->in_dim, first->in_sizes[0]};
}

void spar_plan_describe(const spar_plan *plan, char *text, size_t size)
{
    if (size == 0)
        return;
    *text = 0;
    for (int t = 0; t < plan->ntensors; t++) {
        const spar_plan_tensor *shape = &plan->tensors[t];
        spar_append(text, size, "%s", t ? "; " : "");
        put_list(text, size, shape->global, shape->ndim);
        spar_append(text, size, ": ");
        put_layout(text, size, shape->in_dim, shape->in_sizes, plan->world, shape->in_words);
        spar_append(text, size, " -> ");
        put_layout(text, size, shape->out_dim, shape->out_sizes, plan->world, shape->out_words);
    }
}

void spar_plan_describe_call(const spar_plan *plan, const char *op, const char *text, int64_t number,
                             int64_t forward, char *line, size_t size)
{
    char rest[512];
    size_t limit = sizeof rest < size / 2 ? sizeof rest : size / 2;
    snprintf(rest, limit, "%s", text);
    if (number) {
        spar_append(rest, limit, " (call %lld%s", (long long)number, forward ? ", " : "");
        spar_forward_describe(forward, rest, limit);
        spar_append(rest, limit, ")");
    }
    size_t room = size - strlen(rest);
    snprintf(line, room, "%s ", op ? op : "a call");
    size_t used = strlen(line);
    spar_plan_describe(plan, line + used, room - used);
    if (room > 4 && strlen(line) + 1 == room)
        strcpy(line + room - 4, "...");
    spar_append(line, size, "%s", rest);
}
