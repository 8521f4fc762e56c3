/* Copies past the caches: for more bytes than a cache holds, a store that does not read its line first takes half
 * the time. Streaming stores pass ordinary ones: who made some calls spar_stream_fence before telling anybody. */
#ifndef SPAR_STREAM_H
#define SPAR_STREAM_H

#include <stdint.h>

/* The shortest run that is worth it: below, the unaligned bytes at both ends cost more. */
enum { SPAR_STREAM_RUN = 256 };

/* Whether this processor has such stores, and a copy of so many bytes gains by them. */
int spar_streams(int64_t bytes);

/* n bytes; where spar_streams said so. */
void spar_stream_copy(char *to, const char *from, int64_t n);

/* All that this thread streamed is written before what it writes from now on. */
void spar_stream_fence(void);

#endif
