/* Shared by the test programs: opening the adapter of a DLL, waiting for one request, ending on failure. */
#ifndef PROGRAMS_NETWORKDIRECT_H
#define PROGRAMS_NETWORKDIRECT_H

#include "../../../softrdma/networkdirect/version2.h"

/* Call a method of an interface without writing the pointer twice. */
#define CALL(object, method, ...) (object)->methods->method(object, __VA_ARGS__)
#define CALL0(object, method)     (object)->methods->method(object)

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
/* Ends the process with status 3 if it still runs after that time. */
void limit_time(DWORD milliseconds);
struct sockaddr_in address_of(const char *host, const char *port);
/* Makes a socket address of either family. */
struct sockaddr_in6 any_address_of(const char *host, const char *port);
/* Loads the DLL and opens the adapter with this address. A remote address opens the first adapter. */
IND2Adapter *open_adapter(const char *dll, const void *address, ULONG size_of_address);
/* Whether DllCanUnloadNow returns S_OK. */
BOOL can_unload(void);
void open_end(struct end *end, IND2Adapter *adapter, ULONG depth);
void close_end(struct end *end);
IND2MemoryRegion *new_region(struct end *end, void *memory, SIZE_T size, ULONG flags);
void free_region(struct end *end, IND2MemoryRegion *region);
/* Waits for the request on end->overlapped if `status` is ND_PENDING, and returns the final status. */
HRESULT finished(struct end *end, void *object, HRESULT status);
/* Waits for the next completion. */
ND2_RESULT next_result(struct end *end);

#endif
