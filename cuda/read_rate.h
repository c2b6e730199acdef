/* read_rate: what the card's memory gives a kernel that does nothing but read. For benchmarks. */
#ifndef TANDEM_READ_RATE_H
#define TANDEM_READ_RATE_H

#include "device.cuh"

/* Bytes a second, the best of some readings of a gigabyte; 0: not to be had (a CUDA error, which is left for cudaGetLastError). */
double read_rate(const struct op_context *c);

#endif
