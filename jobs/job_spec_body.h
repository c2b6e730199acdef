/* job_spec_body: the second grade of a job's validation, everything inside "body" and "tandem". Private to jobs/. */
#ifndef TANDEM_JOB_SPEC_BODY_H
#define TANDEM_JOB_SPEC_BODY_H

#include "job_spec.h"

#include <jansson.h>

/* Fills s from body for s->endpoint. What is wrong with it goes to s->fault. False: out of memory. */
bool job_spec_body(struct job_spec *s, const json_t *body);
/* The same from "tandem", which is not null. */
void job_spec_tandem(struct job_spec *s, const json_t *tandem);
#define JOB_PRIORITY_PARAM "tandem.priority"
/* A JSON string's bytes with a NUL behind them; NULL: out of memory. */
char *job_spec_copy(const json_t *string);
bool job_spec_has_nul(const json_t *string);

#endif
