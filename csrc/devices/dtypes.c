/* SPDX-License-Identifier: Apache-2.0 */
/* The dtypes that copies scale, and those that are summed. */
#include "devices/scale.h"
#include "devices/sum.h"

#include <stddef.h>

const spar_scale_type spar_scale_types[] = {
    [SPAR_UNSCALED] = {"as_is", NULL, 1, 0},
#define SPAR_SCALE_TYPE(NAME, name, torch_name, bytes, dlpack_code)                                          \
    [SPAR_##NAME] = {#name, torch_name, bytes, dlpack_code},
#include "devices/scale.def"
#undef SPAR_SCALE_TYPE
};

const spar_sum_type spar_sum_types[] = {
#define SPAR_SUM_TYPE(torch_name, KIND) {torch_name, SPAR_SUM_##KIND},
#include "devices/sum.def"
#undef SPAR_SUM_TYPE
    {NULL, SPAR_NO_SUM},
};
