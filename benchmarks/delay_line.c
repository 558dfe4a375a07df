/* A cable with a delay: what comes in at one end leaves at the other after a fixed time, in both directions.
 *
 *     delay_line MICROSECONDS FRAME_BYTES PID NAME PID NAME
 *
 * Each end is a TAP device of that name in the network namespace of that process. They vanish with this program. "ready"
 * is written when both are there. Needs root. Written for benchmarks/lab.py, since not every kernel has netem.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 16384 }; /* frames under way in one direction; what exceeds them is lost, as in a switch */

struct direction {
  uint64_t *due;    /* SLOTS: when each frame leaves, in ns */
  uint32_t *length; /* SLOTS: its bytes */
  char *frames;     /* SLOTS x frame_bytes */
  uint64_t first, last; /* numbers of the oldest frame under way and of the next one; the slot is the remainder */
};

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void fail(const char *what) {
  fprintf(stderr, "delay_line: %s: %s\n", what, strerror(errno));
  exit(1);
}

static int end_in(const char *pid, const char *name) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%s/ns/net", pid);
  int space = open(path, O_RDONLY);
  if (space < 0 || setns(space, CLONE_NEWNET) < 0) fail(path);
  close(space);
  int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  if (tap < 0) fail("/dev/net/tun");
  struct ifreq request;
  memset(&request, 0, sizeof request);
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  snprintf(request.ifr_name, IFNAMSIZ, "%s", name);
  if (ioctl(tap, TUNSETIFF, &request) < 0) fail(name);
  return tap;
}

int main(int count, char **words) {
  if (count != 7) {
    fprintf(stderr, "delay_line MICROSECONDS FRAME_BYTES PID NAME PID NAME\n");
    return 2;
  }
  uint64_t delay = strtoull(words[1], NULL, 10) * 1000u;
  size_t frame_bytes = strtoull(words[2], NULL, 10);
  struct pollfd ends[2] = {{end_in(words[3], words[4]), POLLIN, 0}, {end_in(words[5], words[6]), POLLIN, 0}};
  struct direction ways[2]; /* ways[i] begins at ends[i] */
  for (int i = 0; i < 2; i++) {
    ways[i].due = malloc(SLOTS * sizeof(uint64_t));
    ways[i].length = malloc(SLOTS * sizeof(uint32_t));
    ways[i].frames = malloc(SLOTS * frame_bytes); /* only what is used becomes memory */
    ways[i].first = ways[i].last = 0;
    if (!ways[i].due || !ways[i].length || !ways[i].frames) fail("memory");
  }
  char *lost = malloc(frame_bytes);
  prctl(PR_SET_TIMERSLACK, 1000); /* ns: it is 50 us else */
  puts("ready");
  fflush(stdout);
  for (;;) {
    uint64_t next = UINT64_MAX;
    for (int i = 0; i < 2; i++) {
      struct direction *way = &ways[i];
      for (int turn = 0; turn < 64; turn++) { /* then the other direction has its turn */
        int slot = (int)(way->last % SLOTS), full = way->last - way->first == SLOTS;
        ssize_t length = read(ends[i].fd, full ? lost : way->frames + slot * frame_bytes, frame_bytes);
        if (length <= 0) break;
        if (full) continue;
        way->due[slot] = now() + delay;
        way->length[slot] = (uint32_t)length;
        way->last++;
      }
      while (way->first < way->last && way->due[way->first % SLOTS] <= now()) {
        int slot = (int)(way->first % SLOTS);
        if (write(ends[1 - i].fd, way->frames + slot * frame_bytes, way->length[slot]) < 0 && errno == EAGAIN) break;
        way->first++; /* a frame to an end that is down is lost */
      }
      if (way->first < way->last && way->due[way->first % SLOTS] < next) next = way->due[way->first % SLOTS];
    }
    struct timespec wait = {0, 0};
    uint64_t time = now();
    if (next > time) {
      uint64_t left = next == UINT64_MAX ? 1000000000u : next - time;
      wait.tv_sec = (time_t)(left / 1000000000u);
      wait.tv_nsec = (long)(left % 1000000000u);
    }
    if (ppoll(ends, 2, &wait, NULL) < 0 && errno != EINTR) fail("ppoll");
  }
}
