/* Returns the number of cores this process may use: the minimum of its affinity (on Linux; elsewhere,
 * of all cores) and its cgroup's quota. Reads files. */
#ifndef SPAR_CORES_H
#define SPAR_CORES_H

int spar_cores(void);

#endif
