/* SPDX-License-Identifier: Apache-2.0 */
#include "base/cgroup.h"

#include "base/util.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH = 4096 };

/* A mount of a cgroup hierarchy, as in /proc/self/mountinfo. */
typedef struct {
    char *root, *point;  /* the cgroup at its top, and where it is mounted */
    int has_controllers; /* v1 */
} mount;

/* Opens the file at the three parts joined; NULL where it cannot. */
static FILE *open_joined(const char *before, const char *middle, const char *after)
{
    char path[PATH];
    int length = snprintf(path, sizeof path, "%s%s%s", before, middle, after);
    return length < (int)sizeof path ? fopen(path, "re") : NULL;
}

/* Up to `count` positive integers from the start of a file; "max", -1 and garbage end them. */
static int read_numbers(const char *directory, const char *name, int count, long long *numbers)
{
    FILE *file = open_joined(directory, "/", name);
    int numbers_read = 0;
    if (!file)
        return 0;
    while (numbers_read < count && fscanf(file, "%lld", &numbers[numbers_read]) == 1 &&
           numbers[numbers_read] > 0)
        numbers_read++;
    fclose(file);
    return numbers_read;
}

static int64_t memory_of(const char *directory)
{
    static const char *const names[] = {"memory.max", "memory.high", "memory.limit_in_bytes"};
    long long number;
    int64_t least = INT64_MAX;
    for (int i = 0; i < 3; i++)
        if (read_numbers(directory, names[i], 1, &number) && number < least)
            least = number;
    return least;
}

static int64_t cores_of(const char *directory)
{
    long long cpu[2]; /* quota, period */
    if (read_numbers(directory, "cpu.max", 2, cpu) < 2 &&
        (!read_numbers(directory, "cpu.cfs_quota_us", 1, &cpu[0]) ||
         !read_numbers(directory, "cpu.cfs_period_us", 1, &cpu[1])))
        return INT64_MAX;
    return cpu[0] < cpu[1] ? 1 : cpu[0] / cpu[1];
}

/* Resolves \040 and the like, in place. */
static char *unescape(char *text)
{
    char *to = text;
    for (const char *from = text; *from; to++) {
        unsigned int code;
        if (*from == '\\' && sscanf(from + 1, "%3o", &code) == 1 && strspn(from + 1, "01234567") >= 3) {
            *to = (char)code;
            from += 4;
        } else {
            *to = *from++;
        }
    }
    *to = 0;
    return text;
}

/* Reads a line of mountinfo; 0 where it is not of a hierarchy that may have the controller. */
static int read_mount(char *line, const char *controller, mount *hierarchy)
{
    char *save = NULL, *fields[5] = {NULL}, *type, *options = NULL;
    char *end = strstr(line, " - ");
    if (!end)
        return 0;
    *end = 0;
    for (int i = 0; i < 5; i++)
        fields[i] = strtok_r(i ? NULL : line, " ", &save);
    type = strtok_r(end + 3, " \n", &save);
    for (int i = 0; i < 2; i++)
        options = strtok_r(NULL, " \n", &save);
    if (!fields[4] || !type)
        return 0;
    *hierarchy = (mount){.root = unescape(fields[3]),
                         .point = unescape(fields[4]),
                         .has_controllers = strcmp(type, "cgroup") == 0};
    return hierarchy->has_controllers ? options && spar_lists(options, ',', controller)
                                      : strcmp(type, "cgroup2") == 0;
}

/* The process's cgroup in the hierarchy of `controller`, "" for v2; "" where it is not listed. */
static void read_own(const char *root, const char *controller, char *own, size_t size)
{
    char *line = NULL;
    size_t room = 0;
    FILE *file = open_joined(root, "/proc/self/cgroup", "");
    *own = 0;
    while (file && getline(&line, &room, file) >= 0) {
        char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
        if (!path)
            continue;
        *path++ = 0;
        path[strcspn(path, "\n")] = 0;
        if (*controller ? spar_lists(names + 1, ',', controller) : !names[1]) {
            snprintf(own, size, "%s", path);
            break;
        }
    }
    free(line);
    if (file)
        fclose(file);
}

/* The part of `own` below the mount's root; "" where the mount does not show it. */
static const char *below(const char *own, const char *mount_root)
{
    size_t length = strcmp(mount_root, "/") == 0 ? 0 : strlen(mount_root);
    const char *rest = own + length;
    if (strncmp(own, mount_root, length) != 0 || (*rest && *rest != '/') || strstr(rest, "/..") ||
        strcmp(rest, "/") == 0)
        return "";
    return rest;
}

/* The least limit on the way from the process's cgroup up to the root of each mount. */
static int64_t least(const char *root, const char *controller, int64_t (*limit_of)(const char *directory))
{
    char *line = NULL, own[PATH], path[2 * PATH];
    size_t room = 0;
    int64_t result = INT64_MAX;
    mount hierarchy;
    FILE *file = open_joined(root, "/proc/self/mountinfo", "");
    while (file && getline(&line, &room, file) >= 0) {
        if (!read_mount(line, controller, &hierarchy))
            continue;
        read_own(root, hierarchy.has_controllers ? controller : "", own, sizeof own);
        int top = snprintf(path, sizeof path, "%s%s", root, hierarchy.point);
        if (top >= PATH)
            continue;
        snprintf(path + top, sizeof path - (size_t)top, "%s", below(own, hierarchy.root));
        for (char *end = path + strlen(path); end; end = strrchr(path + top, '/')) {
            *end = 0;
            int64_t limit = limit_of(path);
            result = limit < result ? limit : result;
        }
    }
    free(line);
    if (file)
        fclose(file);
    return result;
}

int64_t spar_cgroup_memory(const char *root)
{
    return least(root, "memory", memory_of);
}

int64_t spar_cgroup_cores(const char *root)
{
    return least(root, "cpu", cores_of);
}

int64_t spar_usable_memory(void)
{
    int64_t host = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    int64_t group = spar_cgroup_memory("");
    return group < host ? group : host;
}
