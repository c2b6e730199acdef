/* lib_archive: libarchive's <archive.h>, which our archive.h hides on the include path. Private to jobs/.
 *
 * Include it with angle brackets: only a file found through the include path can ask for the next one on it. */
#ifndef TANDEM_LIB_ARCHIVE_H
#define TANDEM_LIB_ARCHIVE_H

#include_next <archive.h>
#include <archive_entry.h>

#endif
