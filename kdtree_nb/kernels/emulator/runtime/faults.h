// faults.h: an access to memory that is not there is an error of the launch, as on a GPU, not the end of the process.
#pragma once

#include "block.h"

#include <pthread.h>
#include <signal.h>

#pragma GCC visibility push(hidden)

namespace emulator {

#ifndef EMULATOR_ASAN  // which has handlers of its own, and says more

constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE};

// While one exists, faults in kernels are caught. Launches may overlap: the last one puts the old handlers back.
class FaultHandlers {
    inline static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    inline static int users = 0;
    inline static struct sigaction before[3];

    static void handle(int signal, siginfo_t* info, void*)
    {
        if (!worker) {  // not in a kernel: fault again, now as everywhere else
            for (int i = 0; i < 3; ++i)
                sigaction(FAULTS[i], &before[i], nullptr);
            return;
        }
        if (signal == SIGFPE)
            fail("division of an integer by zero");
        fail("access to address 0x%zx, which is not there or not aligned (kernels.emulator.sanitize finds the line)",
             reinterpret_cast<size_t>(info->si_addr));
    }

public:
    FaultHandlers()
    {
        struct sigaction action;
        sigemptyset(&action.sa_mask);
        action.sa_sigaction = handle;
        action.sa_flags = SA_SIGINFO | SA_NODEFER;  // fail() does not return from the handler
        pthread_mutex_lock(&lock);
        for (int i = 0; i < 3 && !users; ++i)
            sigaction(FAULTS[i], &action, &before[i]);
        ++users;
        pthread_mutex_unlock(&lock);
    }

    ~FaultHandlers()
    {
        pthread_mutex_lock(&lock);
        --users;
        for (int i = 0; i < 3 && !users; ++i)
            sigaction(FAULTS[i], &before[i], nullptr);
        pthread_mutex_unlock(&lock);
    }
};

#endif

}  // namespace emulator

#pragma GCC visibility pop
