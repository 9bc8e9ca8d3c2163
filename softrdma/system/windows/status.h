/* The status for an error of Windows. */
#ifndef WINDOWS_STATUS_H
#define WINDOWS_STATUS_H

#include <winsock2.h>
#include <windows.h>

#include "../../engine/vocabulary.h"

/* The status of Connect for a Winsock or Win32 error (H.4.2). Other operations on a socket use it too. */
nd_status handshake_status(DWORD error);

#endif
