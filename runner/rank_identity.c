/* rank_identity: everything that decides the bits of an answer, as lines in a fixed order.
 *
 * The runner computes it to name its state and results before a rank runs; each rank computes it from its own files and
 * instruction set and repeats it in its hello. It reads the model's header, tokenizer and digest (kept beside the model
 * once it was computed) and never its weights. The number of threads is left out: it never changes a byte. */
#include <inttypes.h>

#include "build_identity.h"
#include "chat_template.h"
#include "model_config.h"
#include "model_file.h"
#include "partition.h"
#include "rank_backend.h"
#include "rank_main.h"
#include "tokenizer.h"

struct identity_parts {
    char model[65];
    uint64_t tokenizer;
    enum chat_format template;
    const char *numerics;
    struct partition partition;
};

static enum rc collect(const struct options *o, struct model_file *m, struct identity_parts *out, struct err *e)
{
    struct model_config config;
    struct rank_backend backend;
    struct tokenizer *tokenizer = NULL;
    enum rc rc = model_config_read(m, &config, e);
    if (rc == RC_OK) rc = partition_make(&config, o->ranks, PARTITION_FFN_STEP, &out->partition, e);
    if (rc == RC_OK) rc = partition_check(&out->partition, m, e);
    if (rc == RC_OK) rc = tokenizer_open(m, &tokenizer, e);
    if (rc == RC_OK) rc = chat_format_choose(o->chat_format, m, tokenizer, &out->template, e);
    if (tokenizer) out->tokenizer = tokenizer_digest(tokenizer);
    tokenizer_close(tokenizer);
    if (rc != RC_OK) return rc;
    rc = rank_backend_choose(o, 0, &backend, e);
    if (rc != RC_OK) return rc;
    out->numerics = backend.numerics;
    return model_file_digest(m, out->model, e);
}

enum rc rank_identity(const struct options *o, int rank, struct buf *out, struct err *e)
{
    struct model_file *m = NULL;
    struct identity_parts p = {0};
    enum rc rc = model_file_open_rank(o->model, rank, o->ranks, &m, e);
    if (rc != RC_OK) return rc;
    rc = collect(o, m, &p, e);
    model_file_close(m);
    if (rc != RC_OK) return rc;
    buf_clear(out);
    buf_printf(out, "version=%s\nmodel=%s\ntokenizer=%016" PRIx64 "\ntemplate=%s\n", TANDEM_VERSION, p.model, p.tokenizer,
               chat_format_name(p.template));
    buf_printf(out, "backend=%s\nbuild=%s\nranks=%d\npartition=%016" PRIx64 "\n", p.numerics, TANDEM_KERN_BUILD, o->ranks,
               partition_digest(&p.partition));
    buf_printf(out, "weights=%s\nkv=%s\n", o->weights ? o->weights : "native", o->kv ? o->kv : kv_format_name(KV_F16));
    return out->failed ? err_no_memory(e) : RC_OK;
}
