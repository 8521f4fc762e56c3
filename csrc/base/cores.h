/* How many cores this process may use: by its affinity, and its cgroup's quota. Reads files. */
#ifndef SPAR_CORES_H
#define SPAR_CORES_H

int spar_cores(void);

#endif
