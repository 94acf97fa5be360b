/* NVML's C interface over text files beside this library, read again at each call.
 *
 * gpus.txt, one line a GPU: index util_pct power_mw mem_used_mib mem_total_mib temp_c sm_mhz state
 * delay_ms throttle ecc mig refused name. `state` is ok, lost or error; `refused` lists sensors with the
 * code that each returns, as ecc=4,memory=999, or is -; `name` is the rest of the line, any bytes.
 * events.txt, one line an Xid: device via number. The event is about `device`, and is delivered to
 * event sets in which `via` is registered.
 * driver.txt: init_code init_delay_ms cuda_version. processes.txt, one line each: gpu pid.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, TIMEOUT = 10,
       GPU_IS_LOST = 15, INSUFFICIENT_RESOURCES = 23, UNKNOWN = 999, SETS = 24 };

struct gpu { unsigned index, util, power, used, total, temp, mhz, delay, throttle, ecc, mig; char state[16], refused[128], name[96]; };
struct driver { int init; unsigned delay; int cuda; };
struct set { unsigned long long devices; unsigned read; int used; };

static struct set sets[SETS];
static int initialised;

static FILE *beside(const char *name) {
    Dl_info info;
    char path[PATH_MAX], file[PATH_MAX + 32];
    dladdr((void *)beside, &info);
    snprintf(path, sizeof path, "%s", info.dli_fname);
    snprintf(file, sizeof file, "%s/%s", dirname(path), name);
    return fopen(file, "r");
}
static void wait_ms(unsigned ms) {
    struct timespec pause = {ms / 1000, (ms % 1000) * 1000000L};
    if (ms) nanosleep(&pause, NULL);
}
static struct driver driver(void) {
    struct driver d = {0, 0, 13000};
    FILE *stream = beside("driver.txt");
    if (stream && fscanf(stream, "%d %u %d", &d.init, &d.delay, &d.cuda) != 3) d.init = UNKNOWN;
    if (stream) fclose(stream);
    return d;
}
static int ready(void) { return initialised; }

static int look(unsigned index, struct gpu *gpu) {
    char line[512];
    FILE *stream = beside("gpus.txt");
    int found = 0;
    while (stream && fgets(line, sizeof line, stream)) {
        struct gpu g = {0};
        if (sscanf(line, "%u %u %u %u %u %u %u %15s %u %u %u %u %127s %95[^\n]", &g.index, &g.util, &g.power,
                   &g.used, &g.total, &g.temp, &g.mhz, g.state, &g.delay, &g.throttle, &g.ecc, &g.mig, g.refused,
                   g.name) == 14) {
            if (g.index == index) *gpu = g;
            found++;
        }
    }
    if (stream) fclose(stream);
    return found;
}

static int ask(void *device, struct gpu *gpu, const char *sensor) {
    if (!ready()) return UNINITIALIZED;
    memset(gpu, 0, sizeof *gpu);
    look((unsigned)(uintptr_t)device - 1, gpu);
    if (!gpu->state[0]) return INVALID_ARGUMENT;
    wait_ms(gpu->delay);
    if (!strcmp(gpu->state, "lost")) return GPU_IS_LOST;
    if (strcmp(gpu->state, "ok")) return UNKNOWN;
    char key[64], *found;
    snprintf(key, sizeof key, "%s=", sensor);
    return (found = strstr(gpu->refused, key)) ? atoi(found + strlen(key)) : SUCCESS;
}

const char *nvmlErrorString(int code) {
    return code == GPU_IS_LOST ? "GPU is lost" : code == UNKNOWN ? "Unknown Error" : "Error";
}
int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    struct driver d = driver();
    wait_ms(d.delay);
    if (d.init == SUCCESS) initialised = 1;
    return d.init;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
    if (!initialised) return UNINITIALIZED;
    initialised = 0;
    return SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    struct gpu gpu;
    *count = (unsigned)look(~0u, &gpu);
    return ready() ? SUCCESS : UNINITIALIZED;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    struct gpu gpu = {0};
    look(index, &gpu);
    *device = (void *)(uintptr_t)(index + 1);
    return !ready() ? UNINITIALIZED : gpu.state[0] ? SUCCESS : INVALID_ARGUMENT;
}
int nvmlDeviceGetIndex(void *d, unsigned *index) {
    struct gpu g;
    *index = (unsigned)(uintptr_t)d - 1;
    return ask(d, &g, "index");
}
int nvmlDeviceGetName(void *d, char *name, unsigned size) {
    struct gpu g;
    int code = ask(d, &g, "name");
    snprintf(name, size, "%s", g.name);
    return code;
}
int nvmlDeviceGetUUID(void *d, char *uuid, unsigned size) {
    struct gpu g;
    int code = ask(d, &g, "uuid");
    snprintf(uuid, size, "GPU-fake-%u", (unsigned)(uintptr_t)d - 1);
    return code;
}
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *d, struct memory *memory) {
    struct gpu g;
    int code = ask(d, &g, "memory");
    memory->total = (unsigned long long)g.total << 20;
    memory->used = (unsigned long long)g.used << 20;
    memory->free = memory->total - memory->used;
    return code;
}
struct rates { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(void *d, struct rates *rates) {
    struct gpu g;
    int code = ask(d, &g, "util");
    rates->gpu = g.util;
    rates->memory = 0;
    return code;
}
#define FIGURE(name, sensor, field)         \
    int name(void *d, unsigned *value) {    \
        struct gpu g;                       \
        int code = ask(d, &g, sensor);      \
        *value = (field);                   \
        return code;                        \
    }
FIGURE(nvmlDeviceGetPowerUsage, "power", g.power)
FIGURE(nvmlDeviceGetEnforcedPowerLimit, "limit", 400000)
int nvmlDeviceGetTemperature(void *d, int sensor, unsigned *value) {
    struct gpu g;
    int code = ask(d, &g, "temp");
    (void)sensor;
    *value = g.temp;
    return code;
}
int nvmlDeviceGetClockInfo(void *d, int kind, unsigned *value) {
    struct gpu g;
    int code = ask(d, &g, "clock");
    (void)kind;
    *value = g.mhz;
    return code ? code : NOT_SUPPORTED;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *reasons) {
    struct gpu g;
    int code = ask(d, &g, "throttle");
    *reasons = g.throttle;
    return code;
}
int nvmlDeviceGetTotalEccErrors(void *d, int type, int counter, unsigned long long *count) {
    struct gpu g;
    int code = ask(d, &g, "ecc");
    *count = type == 1 && counter == 0 ? g.ecc : 0;
    return code;
}

int nvmlDeviceGetMigMode(void *d, unsigned *now, unsigned *next) {
    struct gpu g;
    int code = ask(d, &g, "mig");
    *now = *next = g.mig;
    return code;
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "580.00");
    return ready() ? SUCCESS : UNINITIALIZED;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = driver().cuda;
    return SUCCESS;
}
int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
struct process { unsigned pid; unsigned long long used; unsigned gi, ci; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *count, struct process *all) {
    struct gpu g;
    int code = ask(d, &g, "processes");
    unsigned device, pid, found = 0;
    FILE *stream = code == SUCCESS ? beside("processes.txt") : NULL;
    while (stream && fscanf(stream, "%u %u", &device, &pid) == 2)
        if (device == (unsigned)(uintptr_t)d - 1) {
            if (all && found < *count) all[found] = (struct process){pid, 1ull << 30, 0, 0};
            found++;
        }
    if (stream) fclose(stream);
    code = code ? code : found && !all ? INSUFFICIENT_SIZE : SUCCESS;
    *count = found;
    return code;
}

struct event { void *device; unsigned long long type, data; unsigned gi, ci; };

/* Returns the number of all events; sets `event` to the first event of the set from `*line` on. */
static unsigned events(struct set *set, unsigned *line, struct event *event) {
    FILE *stream = beside("events.txt");
    unsigned count = 0, device, via;
    unsigned long long number;
    event->device = NULL;
    while (stream && fscanf(stream, "%u %u %llu", &device, &via, &number) == 3)
        if (count++ >= *line && !event->device) {
            *line = count;
            if (set->devices >> via & 1)
                *event = (struct event){(void *)(uintptr_t)(device + 1), 8, number, 0, 0};
        }
    if (stream) fclose(stream);
    return count;
}
int nvmlEventSetCreate(void **set) {
    struct event event;
    unsigned end = ~0u;
    for (int i = 0; i < SETS; i++)
        if (!__sync_lock_test_and_set(&sets[i].used, 1)) {
            sets[i].devices = 0;
            sets[i].read = events(&sets[i], &end, &event);
            *set = &sets[i];
            return ready() ? SUCCESS : UNINITIALIZED;
        }
    return INSUFFICIENT_RESOURCES;
}
int nvmlEventSetFree(void *set) {
    ((struct set *)set)->used = 0;
    return SUCCESS;
}
int nvmlDeviceRegisterEvents(void *d, unsigned long long types, void *set) {
    struct gpu g;
    int code = ask(d, &g, "events");
    (void)types;
    if (code == SUCCESS) ((struct set *)set)->devices |= 1ull << ((uintptr_t)d - 1);
    return code;
}
/* If a device of the set is lost or refuses `wait`, the wait fails once the earlier events are returned. */
int nvmlEventSetWait_v2(void *waiting, struct event *event, unsigned timeout) {
    struct set *set = waiting;
    for (unsigned passed = 0;; passed += 10) {
        if (!ready()) return UNINITIALIZED;
        while (set->read < events(set, &set->read, event) || event->device)
            if (event->device) return SUCCESS;
        for (unsigned index = 0; index < 64; index++) {
            struct gpu g = {0};
            if (set->devices >> index & 1) look(index, &g);
            if (!strcmp(g.state, "lost")) return GPU_IS_LOST;
            char *code = strstr(g.refused, "wait=");
            if (code) return atoi(code + strlen("wait="));
        }
        if (passed >= timeout) return TIMEOUT;
        wait_ms(10);
    }
}
