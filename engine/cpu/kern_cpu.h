/* kern_cpu: the CPU backend. */
#ifndef TANDEM_KERN_CPU_H
#define TANDEM_KERN_CPU_H

#include "kern.h"

/* isa: NULL or "auto" picks the widest the machine has; "amx", "avx512", "avx2", "generic" force one (EXIT_CONFIG if the
 * machine lacks it). threads >= 1: OpenMP threads of this rank. Free with (*out)->close(*out). */
enum rc kern_cpu_open(const char *isa, int threads, struct kern **out, struct err *e);
/* The numerics name that kern_cpu_open would give ("cpu-avx512"), without opening. NULL: the machine lacks it. */
const char *kern_cpu_numerics(const char *isa);

#endif
