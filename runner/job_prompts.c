/* job_prompts: read the line again, build, show, forget. */
#include "job_prompts.h"

enum rc job_prompts_each(const struct job_set *set, struct prompter *p, job_prompt_fn each, void *ctx, struct err *e)
{
    enum rc rc = RC_OK;
    for (size_t i = 0; i < set->n_entries && rc == RC_OK; i++) {
        const struct job_entry *entry = &set->entries[i];
        struct job_spec spec;
        struct job_fault fault = {0};
        struct prompt prompt = {0};
        const struct prompt_documents documents = {job_set_root(set, i), entry->document_digests, entry->document_digests_bytes};
        if (entry->fault) continue;
        bool good = job_set_spec(set, i, &spec, &fault);
        if (good) good = prompt_build(p, &spec, &documents, &prompt, &fault);
        rc = each(ctx, i, good ? &prompt : NULL, good ? NULL : &fault, e);
        prompt_free(&prompt);
        job_spec_free(&spec);
    }
    return rc;
}
