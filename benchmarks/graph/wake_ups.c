// Floor of a graph: processes that wake each other by semaphores in shared memory. No value travels, and nothing but
// this code runs between two wake-ups. Compiled and called by `wake_ups.py`.
#include <errno.h>
#include <semaphore.h>
#include <time.h>

// Post `next` once for each post of `own`. Returns only after a signal, whose handler Python runs then.
void pass_on(sem_t *own, sem_t *next) {
    while (!sem_wait(own)) sem_post(next);
}

// Post `count` semaphores, and wait for as many posts of `own`. Return 0, or -1 if they take longer than `timeout_s`.
int call(sem_t *own, sem_t **others, int count, int timeout_s) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += timeout_s;
    for (int i = 0; i < count; i++) sem_post(others[i]);
    for (int i = 0; i < count; i++)
        while (sem_timedwait(own, &until))
            if (errno != EINTR) return -1;
    return 0;
}
