/* job_prompts: the prompts of all jobs of a set, one at a time, for commands that only look. */
#ifndef TANDEM_JOB_PROMPTS_H
#define TANDEM_JOB_PROMPTS_H

#include "job_set.h"
#include "prompt.h"

/* Exactly one of prompt and fault is NULL; both are valid during the call. An error ends the walk. */
typedef enum rc (*job_prompt_fn)(void *ctx, size_t i, const struct prompt *prompt, const struct job_fault *fault, struct err *e);

/* Builds the prompt of every job whose fault is not known already, as a run would, in order. */
enum rc job_prompts_each(const struct job_set *set, struct prompter *p, job_prompt_fn each, void *ctx, struct err *e);

#endif
