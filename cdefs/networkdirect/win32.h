/* The Win32 and Winsock calls that ndpy makes, in cffi's words. BOOL is int32_t, DWORD uint32_t, HANDLE void *. */

struct nd_overlapped_entry { /* OVERLAPPED_ENTRY */
    uintptr_t key;
    struct nd_overlapped *overlapped;
    uintptr_t internal;
    uint32_t bytes;
};

/* WSAPROTOCOL_INFOW, flattened. The provider's GUID is 16 bytes in memory order. */
struct nd_protocol {
    uint32_t service_flags;
    uint32_t provider_flags;
    unsigned char provider_id[16];
    uint32_t catalog_entry_id;
    int32_t version;
    int32_t address_family;
    int32_t socket_type;
    int32_t protocol;
    int32_t protocol_max_offset;
    wchar_t name[256];
};

uint32_t GetLastError(void);
void *CreateIoCompletionPort(void *file, void *port, uintptr_t key, uint32_t threads);
int32_t PostQueuedCompletionStatus(void *port, uint32_t bytes, uintptr_t key, void *overlapped);
void *CreateEventW(void *security, int32_t manual, int32_t initial, void *name);
int32_t SetEvent(void *event);
int32_t ResetEvent(void *event);
uint32_t WaitForSingleObject(void *handle, uint32_t timeout_ms);
int32_t CloseHandle(void *handle);
int32_t FreeLibrary(void *module);
void *VirtualAllocExNuma(void *process, void *address, size_t size, uint32_t type, uint32_t protection, uint32_t node);
int32_t VirtualFree(void *address, size_t size, uint32_t type);
size_t GetLargePageMinimum(void);
