/* Provider DLLs: the Winsock catalogue that names them, and their exports. */

struct ndpy_library {
    HMODULE module;
    int32_t(WINAPI *get_class_object)(const void *class_id, const void *iid, void **object);
    int32_t(WINAPI *can_unload_now)(void);
};

_Static_assert(sizeof(WSAPROTOCOL_INFOW) == 628, "an entry of the catalogue");

static void copy_protocol(struct nd_protocol *out, const WSAPROTOCOL_INFOW *entry)
{
    out->service_flags = entry->dwServiceFlags1;
    out->provider_flags = entry->dwProviderFlags;
    memcpy(out->provider_id, &entry->ProviderId, sizeof out->provider_id);
    out->catalog_entry_id = entry->dwCatalogEntryId;
    out->version = entry->iVersion;
    out->address_family = entry->iAddressFamily;
    out->socket_type = entry->iSocketType;
    out->protocol = entry->iProtocol;
    out->protocol_max_offset = entry->iProtocolMaxOffset;
    memcpy(out->name, entry->szProtocol, sizeof out->name);
    out->name[255] = 0;
}

int ndpy_protocols(struct nd_protocol *out, int count)
{
    WSAPROTOCOL_INFOW *entries = NULL;
    DWORD size = 0;
    INT error = 0;
    int found;

    if (WSCEnumProtocols(NULL, NULL, &size, &error) != SOCKET_ERROR)
        return 0;
    if (error != WSAENOBUFS)
        return -error;
    entries = malloc(size);
    if (!entries)
        return -WSAENOBUFS;
    found = WSCEnumProtocols(NULL, entries, &size, &error);
    if (found == SOCKET_ERROR)
        found = -error;
    for (int i = 0; i < found && i < count; i++)
        copy_protocol(&out[i], &entries[i]);
    free(entries);
    return found;
}

uint32_t ndpy_provider_path(const unsigned char *provider_id, wchar_t *path, uint32_t size)
{
    wchar_t raw[MAX_PATH] = L"";
    INT length = MAX_PATH, error = 0;
    DWORD expanded;
    GUID id;

    memcpy(&id, provider_id, sizeof id);
    if (WSCGetProviderPath(&id, raw, &length, &error) != 0)
        return error ? (uint32_t)error : ERROR_FILE_NOT_FOUND;
    /* Wine answers with success and writes nothing. */
    if (!raw[0])
        return ERROR_FILE_NOT_FOUND;
    expanded = ExpandEnvironmentStringsW(raw, path, size);
    if (!expanded)
        return GetLastError();
    return expanded > size ? ERROR_INSUFFICIENT_BUFFER : 0;
}

uint32_t ndpy_install_provider(const unsigned char *provider_id, const wchar_t *path,
                               const struct nd_protocol *protocol)
{
    WSAPROTOCOL_INFOW entry;
    INT error = 0;
    GUID id;

    memset(&entry, 0, sizeof entry);
    memcpy(&id, provider_id, sizeof id);
    entry.dwServiceFlags1 = protocol->service_flags;
    entry.dwProviderFlags = protocol->provider_flags;
    entry.ProviderId = id;
    entry.ProtocolChain.ChainLen = BASE_PROTOCOL;
    entry.iVersion = protocol->version;
    entry.iAddressFamily = protocol->address_family;
    entry.iMaxSockAddr = sizeof(struct sockaddr_storage);
    entry.iMinSockAddr =
        protocol->address_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    entry.iSocketType = protocol->socket_type;
    entry.iProtocol = protocol->protocol;
    entry.iProtocolMaxOffset = protocol->protocol_max_offset;
    memcpy(entry.szProtocol, protocol->name, sizeof entry.szProtocol);
    if (WSCInstallProvider(&id, path, &entry, 1, &error) == SOCKET_ERROR)
        return (uint32_t)error;
    return 0;
}

uint32_t ndpy_deinstall_provider(const unsigned char *provider_id)
{
    INT error = 0;
    GUID id;

    memcpy(&id, provider_id, sizeof id);
    return WSCDeinstallProvider(&id, &error) == SOCKET_ERROR ? (uint32_t)error : 0;
}

struct ndpy_library *ndpy_load_provider(const wchar_t *path, uint32_t *error, const char **missing)
{
    struct ndpy_library *library = calloc(1, sizeof *library);

    *error = 0;
    *missing = NULL;
    if (!library) {
        *error = ERROR_NOT_ENOUGH_MEMORY;
        return NULL;
    }
    library->module = LoadLibraryExW(path, NULL, 0);
    if (!library->module) {
        *error = GetLastError();
        goto fail;
    }
    *missing = "DllGetClassObject";
    library->get_class_object = (void *)GetProcAddress(library->module, *missing);
    if (!library->get_class_object)
        goto fail;
    *missing = "DllCanUnloadNow";
    library->can_unload_now = (void *)GetProcAddress(library->module, *missing);
    if (!library->can_unload_now)
        goto fail;
    *missing = NULL;
    return library;
fail:
    ndpy_unload_provider(library);
    return NULL;
}

int32_t ndpy_get_class_object(struct ndpy_library *library, const unsigned char *class_id, const void *iid,
                              void **object)
{
    return library->get_class_object(class_id, iid, object);
}

int32_t ndpy_can_unload(struct ndpy_library *library)
{
    return library->can_unload_now();
}

void ndpy_unload_provider(struct ndpy_library *library)
{
    if (library->module)
        FreeLibrary(library->module);
    free(library);
}

const void *ndpy_iid(const char *name)
{
    for (size_t i = 0; i < sizeof ndpy_interfaces / sizeof ndpy_interfaces[0]; i++)
        if (!strcmp(ndpy_interfaces[i].name, name))
            return ndpy_interfaces[i].iid;
    return NULL;
}
