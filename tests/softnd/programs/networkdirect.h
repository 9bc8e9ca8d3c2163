/* What the test programs have in common: opening the adapter of a DLL, waiting for one request, ending on failure. */
#ifndef PROGRAMS_ND_H
#define PROGRAMS_ND_H

#include "../../../softnd/version2.h"

/* The calls of an interface, without naming the pointer twice. */
#define CALL(object, method, ...) (object)->methods->method(object, __VA_ARGS__)
#define CALL0(object, method) (object)->methods->method(object)

/* One thread's end of one connection. */
struct end {
    IND2Adapter *adapter;
    HANDLE file;
    OVERLAPPED overlapped;
    IND2CompletionQueue *cq;
    IND2QueuePair *queue_pair;
    IND2Connector *connector;
};

void die(const char *what, HRESULT status);
void check(const char *what, HRESULT status);
/* Ends the process with status 3 when it still runs after that time. */
void limit_time(DWORD milliseconds);
struct sockaddr_in address_of(const char *host, const char *port);
/* The same for both families. */
struct sockaddr_in6 any_address_of(const char *host, const char *port);
/* Loads the DLL and opens the adapter that has the address, or the first one if it has none (a remote address). */
IND2Adapter *open_adapter(const char *dll, const void *address, ULONG size_of_address);
/* Whether DllCanUnloadNow says S_OK. */
BOOL can_unload(void);
void open_end(struct end *end, IND2Adapter *adapter, ULONG depth);
void close_end(struct end *end);
IND2MemoryRegion *new_region(struct end *end, void *memory, SIZE_T size, ULONG flags);
void free_region(struct end *end, IND2MemoryRegion *region);
/* The status of a request on end->overlapped that `status` says is pending; waits for it. */
HRESULT finished(struct end *end, void *object, HRESULT status);
/* The next completion; waits for it. */
ND2_RESULT next_result(struct end *end);

#endif
