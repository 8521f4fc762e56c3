/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/cuda/cubin_cache.h"

#include "base/env.h"
#include "devices/cuda/nvrtc.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 64 << 20 }; /* most bytes of a valid file */

/* The header of a file. */
typedef struct {
    char magic[8];
    uint64_t key, size, hash; /* key: what made it; size and hash: what follows */
} header;

static const char magic[8] = {'s', 'p', 'a', 'r', 'c', 'u', '0', '1'};

static uint64_t mix(uint64_t hash, const void *data, size_t size)
{
    for (const unsigned char *byte = data; size; byte++, size--)
        hash = (hash ^ *byte) * 0x100000001b3u;
    return hash ^ hash >> 29;
}

/* Finds or makes the folder; 0 if there is none. */
static int find_folder(char *folder, size_t size)
{
    const char *cache = spar_env_text("XDG_CACHE_HOME"), *home = spar_env_text("HOME");
    int n = 0;
    if (cache && *cache == '/')
        n = snprintf(folder, size, "%s/spar", cache);
    else if (home && *home == '/')
        n = snprintf(folder, size, "%s/.cache/spar", home);
    if (n <= 0 || (size_t)n >= size)
        return 0;
    for (char *slash = folder + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        mkdir(folder, 0700);
    }
    return mkdir(folder, 0700) == 0 || errno == EEXIST;
}

/* fopen has no mode for these flags, nor for a file that belongs to its user alone. */
static FILE *open_stream(const char *path, int flags, const char *mode)
{
    int file = open(path, flags | O_CLOEXEC, 0600);
    FILE *stream = file < 0 ? NULL : fdopen(file, mode);
    if (!stream && file >= 0)
        close(file);
    return stream;
}

/* Returns the file's cubin, or NULL if there is no valid file. */
static char *load(const char *path, uint64_t key, size_t *size)
{
    struct stat is;
    header head;
    char *code = NULL;
    FILE *file = open_stream(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK, "rb");
    if (!file)
        return NULL;
    if (fstat(fileno(file), &is) == 0 && S_ISREG(is.st_mode) && is.st_uid == geteuid() &&
        (is.st_mode & (S_IWGRP | S_IWOTH)) == 0 && fread(&head, sizeof head, 1, file) == 1 &&
        memcmp(head.magic, magic, sizeof magic) == 0 && head.key == key && head.size > 0 &&
        head.size < MOST && is.st_size == (off_t)(sizeof head + head.size) &&
        (code = malloc(head.size)) != NULL) {
        *size = head.size;
        if (fread(code, head.size, 1, file) != 1 || mix(key, code, head.size) != head.hash) {
            free(code);
            code = NULL;
        }
    }
    fclose(file);
    return code;
}

/* Writes a temporary file and renames it: readers see a complete file or none. Failures are ignored. */
static void store(const char *path, uint64_t key, const char *code, size_t size)
{
    char temporary[4200];
    struct timespec now;
    header head = {.key = key, .size = size, .hash = mix(key, code, size)};
    memcpy(head.magic, magic, sizeof magic);
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(temporary, sizeof temporary, "%s.%d.%lx", path, (int)getpid(), now.tv_nsec);
    FILE *file = open_stream(temporary, O_WRONLY | O_CREAT | O_EXCL, "wb");
    if (!file)
        return;
    int whole = fwrite(&head, sizeof head, 1, file) == 1 && fwrite(code, size, 1, file) == 1 &&
                fflush(file) == 0 && fsync(fileno(file)) == 0;
    if (fclose(file) != 0 || !whole || rename(temporary, path) != 0)
        unlink(temporary);
}

spar_status spar_cubin_cache_get(const char *source, int capability, char **cubin, size_t *size,
                                 int *compiled)
{
    char folder[4096], path[4160] = "";
    int version, arch;
    SPAR_TRY(spar_nvrtc_open());
    SPAR_TRY(spar_nvrtc_version(&version));
    SPAR_TRY(spar_nvrtc_arch(capability, &arch));
    uint64_t key = mix(0xcbf29ce484222325u, source, strlen(source));
    key = mix(key, spar_nvrtc_options, strlen(spar_nvrtc_options));
    key = mix(mix(key, &version, sizeof version), &arch, sizeof arch);
    if (find_folder(folder, sizeof folder)) {
        snprintf(path, sizeof path, "%s/sm_%d-%016llx.cubin", folder, arch, (unsigned long long)key);
        *cubin = load(path, key, size);
    } else {
        *cubin = NULL;
    }
    if (compiled)
        *compiled = !*cubin;
    if (*cubin)
        return SPAR_OK;
    SPAR_TRY(spar_nvrtc_compile(source, arch, cubin, size));
    if (*path)
        store(path, key, *cubin, *size);
    return SPAR_OK;
}
