/* guarded_copy on Linux relies on its signal handler. Programs and their libraries may put theirs over it. */
#ifndef LINUX_GUARDED_H
#define LINUX_GUARDED_H

/* Puts the handler on top again if another one replaced it, and then chains to that one. Looks at most once per tick of
 * the coarse clock, which is 1 to 10 ms. Workers call this once per wake-up. A face calls it before it copies from or
 * to the consumer's memory. */
void guarded_copy_refresh(void);

#endif
