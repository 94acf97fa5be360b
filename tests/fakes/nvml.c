/* NVML's C interface over a text file: gpus.txt beside this library, read again at each call.
 *
 * One line a GPU: index util_pct power_mw mem_used_mib mem_total_mib temp_c sm_mhz state xid
 * delay_ms throttle ecc, where state is ok, lost or error. Only what the console asks for is here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, TIMEOUT = 10, GPU_IS_LOST = 15, UNKNOWN = 999 };

struct gpu { unsigned index, util, power, used, total, temp, mhz, xid, delay, throttle, ecc; char state[16]; };

static int sets[64], made; /* which device each event set watches, plus one */

static int look(unsigned index, struct gpu *gpu) {
    Dl_info info;
    char path[PATH_MAX], line[256];
    dladdr((void *)look, &info);
    snprintf(path, sizeof path, "%s", info.dli_fname);
    char file[PATH_MAX + 16];
    snprintf(file, sizeof file, "%s/gpus.txt", dirname(path));
    FILE *stream = fopen(file, "r");
    int found = 0;
    while (stream && fgets(line, sizeof line, stream)) {
        struct gpu g;
        if (sscanf(line, "%u %u %u %u %u %u %u %15s %u %u %u %u", &g.index, &g.util, &g.power, &g.used,
                   &g.total, &g.temp, &g.mhz, g.state, &g.xid, &g.delay, &g.throttle, &g.ecc) == 12) {
            if (g.index == index) *gpu = g;
            found++;
        }
    }
    if (stream) fclose(stream);
    return found;
}

static int ask(void *device, struct gpu *gpu) {
    look((unsigned)(uintptr_t)device - 1, gpu);
    if (gpu->delay) {
        struct timespec pause = {gpu->delay / 1000, (gpu->delay % 1000) * 1000000L};
        nanosleep(&pause, NULL);
    }
    if (!strcmp(gpu->state, "lost")) return GPU_IS_LOST;
    return strcmp(gpu->state, "ok") ? UNKNOWN : SUCCESS;
}

const char *nvmlErrorString(int code) {
    return code == GPU_IS_LOST ? "GPU is lost" : code == UNKNOWN ? "Unknown Error" : "Error";
}
int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    struct gpu gpu;
    *count = (unsigned)look(~0u, &gpu);
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(uintptr_t)(index + 1);
    return SUCCESS;
}
int nvmlDeviceGetName(void *d, char *name, unsigned size) {
    (void)d;
    snprintf(name, size, "Fake A100-SXM4-80GB");
    return SUCCESS;
}
int nvmlDeviceGetUUID(void *d, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-fake-%u", (unsigned)(uintptr_t)d - 1);
    return SUCCESS;
}
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *d, struct memory *memory) {
    struct gpu g;
    int code = ask(d, &g);
    memory->total = (unsigned long long)g.total << 20;
    memory->used = (unsigned long long)g.used << 20;
    memory->free = memory->total - memory->used;
    return code;
}
struct rates { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(void *d, struct rates *rates) {
    struct gpu g;
    int code = ask(d, &g);
    rates->gpu = g.util;
    rates->memory = 0;
    return code;
}
#define FIGURE(name, field)                 \
    int name(void *d, unsigned *value) {    \
        struct gpu g;                       \
        int code = ask(d, &g);              \
        *value = (field);                   \
        return code;                        \
    }
FIGURE(nvmlDeviceGetPowerUsage, g.power)
FIGURE(nvmlDeviceGetEnforcedPowerLimit, 400000)
int nvmlDeviceGetTemperature(void *d, int sensor, unsigned *value) {
    struct gpu g;
    int code = ask(d, &g);
    (void)sensor;
    *value = g.temp;
    return code;
}
int nvmlDeviceGetClockInfo(void *d, int kind, unsigned *value) {
    (void)d; (void)kind; (void)value;
    return NOT_SUPPORTED;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *reasons) {
    struct gpu g;
    int code = ask(d, &g);
    *reasons = g.throttle;
    return code;
}
int nvmlDeviceGetTotalEccErrors(void *d, int type, int counter, unsigned long long *count) {
    struct gpu g;
    int code = ask(d, &g);
    *count = type == 1 && counter == 0 ? g.ecc : 0;
    return code;
}
int nvmlEventSetCreate(void **set) {
    *set = &sets[made++];
    return SUCCESS;
}
int nvmlDeviceRegisterEvents(void *d, unsigned long long types, void *set) {
    (void)types;
    *(int *)set = (int)(uintptr_t)d;
    return SUCCESS;
}
struct event { void *device; unsigned long long type, data; unsigned gi, ci; };
int nvmlEventSetWait_v2(void *set, struct event *event, unsigned timeout) {
    struct gpu g = {0};
    int device = *(int *)set;
    (void)timeout;
    if (device) look((unsigned)device - 1, &g);
    if (!g.xid) return TIMEOUT;
    *event = (struct event){(void *)(uintptr_t)device, 8, g.xid, 0, 0};
    return SUCCESS;
}
