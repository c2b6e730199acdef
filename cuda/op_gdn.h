/* op_gdn: Gated DeltaNet: convolution, l2norm, gates, recurrence or chunks, gated norm. Shapes and meaning as in kern.h. */
#ifndef TANDEM_OP_GDN_H
#define TANDEM_OP_GDN_H

#include "batch.h"
#include "device.cuh"

const char *op_gdn_unsupported(const struct kern_gdn_shape *s);
size_t op_gdn_state_bytes(const struct kern_gdn_shape *s);
size_t op_gdn_replay_bytes(const struct kern_gdn_shape *s);
size_t op_gdn_scratch_bytes(const struct kern_gdn_shape *s, int rows);

/* Decode segments of the batch, then its prefill segments. */
void op_gdn_decode(const struct op_context *c, const struct device_batch *b, const struct kern_gdn_shape *s,
                   const struct kern_gdn_weights *w, struct kern_gdn_memory m, const float *in, void *scratch, void *o_act);
void op_gdn_prefill(const struct op_context *c, const struct device_batch *b, const struct kern_gdn_shape *s,
                    const struct kern_gdn_weights *w, struct kern_gdn_memory m, const float *in, void *scratch, void *o_act);
/* Of all layers: w[n_layers], memory as in kern.h. */
void op_gdn_replay(const struct op_context *c, const struct kern_gdn_shape *s, const struct kern_gdn_weights *w, int n_layers,
                   struct kern_gdn_memory m, int slot, int rows);

#endif
