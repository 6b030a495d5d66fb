/* A small fake of NVML: which processes have a context. Those that made one and live, and those that a test says. */
#include "control.h"
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, UNINITIALIZED = 1, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef struct { unsigned pid; unsigned long long bytes; unsigned instance, compute_instance; } Process;

static int initialized;

EXPORT int nvmlInit_v2(void) { initialized = 1; return SUCCESS; }
EXPORT int nvmlShutdown(void) { initialized = 0; return SUCCESS; }

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    snprintf(version, length, "580.00 (fake)");
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    if (!initialized)
        return UNINITIALIZED;
    if (strncmp(uuid, "GPU-", 4))
        return NOT_FOUND;
    *device = (void *)1;
    return SUCCESS;
}

/* A process that has ended and has not been reaped has no context any more. */
static int lives(int pid)
{
    char path[64], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1)
        state = 'Z';
    fclose(file);
    return state != 'Z' && state != 'X';
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *found)
{
    atomic_int *words = control();
    unsigned room = *count, n = 0;
    (void)device;
    for (int i = HOLDERS; i < WORDS; i++) {
        int pid = atomic_load(&words[i]);
        if (!pid || (i < LINGER && !lives(pid)))
            continue;
        if (n < room)
            found[n] = (Process){.pid = (unsigned)pid};
        n++;
    }
    *count = n;
    return n > room ? INSUFFICIENT_SIZE : SUCCESS;
}

EXPORT const char *nvmlErrorString(int code) { return code ? "an NVML error" : "success"; }
