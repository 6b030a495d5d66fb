/* What a test and all processes under a fake driver share: a file of whole numbers, mapped by each of them.
 *
 * FAKE_CUDA_CONTROL names it; without it each process has numbers of its own. tests/cuda/control.py has the same list.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    HOLD,          /* not 0: streams take up nothing new */
    FAIL_IN,       /* the copy that counts this down to 0 fails with FAIL_CODE, and so does all that follows in its context */
    FAIL_CODE,     /* a CUresult */
    COPIES,        /* copies carried out */
    MEMORY_MIB,    /* what a device has; 0: 1024 */
    CONTEXTS,      /* primary contexts made, ever */
    ALLOCATIONS,   /* cuMemCreate, ever */
    MAPPED,        /* ranges mapped now, in all processes that ended orderly */
    REGISTERED,    /* host ranges pinned, ever */
    HOLDERS = 16,  /* process ids that have had a context, 0 at the end */
    LINGER = 80,   /* process ids that the driver shall say have one, dead or not */
    WORDS = 96,
};

static atomic_int own[WORDS];

static atomic_int *control(void)
{
    static _Atomic(atomic_int *) words;
    atomic_int *found = atomic_load(&words);
    if (found)
        return found;
    const char *path = getenv("FAKE_CUDA_CONTROL");
    found = own;
    if (path && *path) {
        int fd = open(path, O_RDWR | O_CLOEXEC);
        void *at = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED)
            abort();
        close(fd);
        found = at;
    }
    atomic_store(&words, found);
    return found;
}
