/* prefix_recover: an index that is safe to open, and files and index that agree. Private to the prefix store.
 *
 * Both before this process has the index open. */
#ifndef TANDEM_PREFIX_RECOVER_H
#define TANDEM_PREFIX_RECOVER_H

#include "base.h"

#define PREFIX_INDEX_NAME "index.mdb"

/* For who is alone (holds the folder's lock exclusively): leaves a new index of what is whole in the old one and in payload
 * files, with no file that is not in it. Errors as of prefix_store_open. */
enum rc prefix_recover(const char *folder, int folder_fd, struct err *e);
/* For who is not: RC_FAILED "store_damaged" when the index is damaged. */
enum rc prefix_recover_check(const char *folder, struct err *e);

#endif
