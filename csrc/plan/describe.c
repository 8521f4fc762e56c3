/* A plan in words. */
#include "plan/plan.h"

#include <stdarg.h>
#include <stdio.h>

typedef struct {
    char *next;
    size_t left;
} writer;

static void put(writer *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put(writer *w, const char *format, ...)
{
    va_list args;
    if (w->left <= 1) /* full: a text of very many ranks would go on for long */
        return;
    va_start(args, format);
    int n = vsnprintf(w->next, w->left, format, args);
    va_end(args);
    size_t used = n < 0 ? 0 : (size_t)n < w->left ? (size_t)n : w->left - 1;
    w->next += used;
    w->left -= used;
}

static void put_list(writer *w, const int64_t *values, int count)
{
    for (int i = 0; i < count; i++)
        put(w, "%s%lld", i ? ", " : "[", (long long)values[i]);
    put(w, "]");
}

static void put_layout(writer *w, int dim, const int64_t *sizes, int world, uint32_t order)
{
    if (dim < 0) {
        put(w, "whole");
        return;
    }
    put(w, "dim %d in ", dim);
    put_list(w, sizes, world);
    if (order)
        put(w, " (order %08x)", (unsigned)order);
}

void spar_plan_describe(const spar_plan *plan, char *text, size_t size)
{
    writer w = {text, size};
    if (size == 0)
        return;
    *text = 0;
    put(&w, "%s", plan->op->name);
    for (int t = 0; t < plan->ntensors; t++) {
        const spar_plan_tensor *shape = &plan->tensors[t];
        put(&w, "%s ", t ? ";" : "");
        put_list(&w, shape->global, shape->ndim);
        put(&w, ": ");
        put_layout(&w, shape->in_dim, shape->in_sizes, plan->world, shape->in_order);
        put(&w, " -> ");
        put_layout(&w, shape->out_dim, shape->out_sizes, plan->world, shape->out_order);
    }
}
