# Each target sets up what it needs on a fresh Debian, Ubuntu or Fedora machine. Run it as root or with sudo.

.PHONY: help setup venv softverbs smoke smoke-windows test test-freethreaded test-kernels test-hosts test-warnings stress lint docs wheels windows clean softnd softnd-check softnd-fuzz softrdma-coverage softnd-bench soft-bench mutants bench bench-windows bench-cache bench-asyncio bench-peers bench-scale soak bench-register
.DEFAULT_GOAL := help

PYTHON ?= python3
# Where the tests run. --vm: in a VM, which is the same everywhere and does not change this machine. Empty: on an adapter of
# this machine, if there is one.
SOFTROCE ?= --vm
# Further arguments for `ndpy smoke` and for pytest
ARGS ?=

export PYTHON SOFTROCE ARGS

# It prints what follows.
## make smoke           run the hardware smoke test on soft0, and then on a driver of the kernel, in a VM
## make smoke-windows   run it on softnd, under Wine
## make test            run all the tests
## make test-kernels    run the smoke test and the contract on the newest kernels of Debian; KERNELS= chooses
## make test-freethreaded  run the unit tests and the contract on soft0 with a free-threaded Python; PART=tsan, rxe choose others
## make test-hosts      run the tests of two hosts, VMs with a network between them, on ADAPTER (rxe, siw)
## make test-warnings   run the unit and contract tests with every warning as an error
## make stress          run all the tests with full counts
## make soak            run a busy server with the registration cache for SOAK_S (600) seconds on ADAPTER (rxe, siw, softnd)
## make soak WHAT=aio   run connections of ndpy.aio that come, talk and go, on ADAPTER (rxe, siw, soft0)
## make mutants         make COUNT (300) small changes to ndpy and see whether the tests notice; also SEED, FILES, PLACES
## make mutants LOGIC=1 plant each fault of tests/mutants/logic, one at a time, and see whether its tests notice, on soft0
## make mutants NOTHING=1  let each public method do nothing, and tell the tests that name it and still pass, on soft0
## make lint            run ruff, mypy and clang-format
## make setup           install packages, a kernel for the VM, and .venv
## make venv            create only .venv
## make windows         build ndpy/_*.pyd and softnd.dll, for Windows or Wine
## make softverbs       build the libraries of soft0, the software adapter for Linux, into ndpy/platforms/verbs/soft
## make softnd          build softrdma/build/softnd.dll, the software NetworkDirect provider
## make softnd-check    run the tests of softnd
## make softnd-fuzz     run its wire code and the engine in fuzzers, a minute each
## make softrdma-coverage  how many lines of the engine its tests on Linux reach
## make softnd-bench    compare its speed with that of TCP
## make soft-bench      compare soft0's speed with that of TCP, then show rxe in a VM
## make bench           compare ndpy with C and two other Python packages on rxe and softnd, and with its bars
## make bench-cache     compare a hit of the registration cache with a registration
## make bench-asyncio   measure what asyncio costs beside a Poller, and long messages beside plain writes
## make bench-peers     measure soft0 and ndpy.aio beside asyncio's streams, uvloop, UCX and iperf3
## make bench-scale     measure how costs grow with the number of regions, queue pairs, connections and so on
## make bench-register  compare registering 64 buffers one by one and all at once, on rxe and softnd
## make bench-windows   the part of make bench on softnd
## make docs            build the documentation's site, in docs/_build/html
## make wheels          build the wheels for Linux and Windows and the source archive, in dist/
## make clean           remove everything that was built
help:
	@sed -n 's/^## //p' $(firstword $(MAKEFILE_LIST))

setup:
	@rig/setup.sh

venv:
	@rig/setup.sh venv

smoke-windows: windows
	@NDPY_PROVIDER='softrdma\build\softnd.dll' WINE_LIMIT=900 rig/wine-python -m ndpy smoke softnd0 $(ARGS)

# soft0 needs little, so it comes first.
smoke:
	@rig/setup.sh soft
	.venv/bin/ndpy smoke soft0 $(ARGS)
	@rig/setup.sh
	@.venv/bin/python -m compileall -q ndpy # the VM is slow at compiling
	.venv/bin/ndpy vm run $(SOFTROCE) --adapter rxe --limit 900 -- .venv/bin/ndpy smoke rxe0 $(ARGS)

# Its parts, and which variables choose among them and change them, are in rig/run_tests.py.
run_tests = @.venv/bin/python rig/run_tests.py

test: setup
	$(run_tests)

stress: setup
	@rig/setup.sh browser
	@rig/setup.sh fleet
	@NDPY_STRESS=1 .venv/bin/python rig/run_tests.py

# See rig/kernels.sh.
KERNELS ?= stable testing unstable
export KERNELS

test-kernels: setup
	$(run_tests) kernels

# own, rxe or tsan
PART ?= own

test-freethreaded:
	@rig/setup.sh soft
	$(run_tests) freethreaded-$(PART)

# LIMIT=7200 NDPY_STRESS=1 is possible too.
test-hosts: setup
	$(run_tests) hosts

test-warnings: setup
	$(run_tests) warnings

# setup.sh has built the extension modules.
windows: softnd
	@ls -l ndpy/_*.pyd softrdma/build/softnd.dll

ADAPTER ?= rxe
SOAK_S ?= 600
# cache or aio
WHAT ?= cache
soak_program = tests/soak/$(if $(filter aio,$(WHAT)),busy_connections,busy_server).py
export SOAK_S ADAPTER

# soft0 needs no VM.
soak: setup
ifeq ($(ADAPTER),softnd)
	$(MAKE) -C softrdma build/softnd.dll
	NDPY_PROVIDER='softrdma\build\softnd.dll' WINE_LIMIT=$$((SOAK_S + 120)) rig/wine-python $(soak_program) softnd0
else ifeq ($(ADAPTER),soft0)
	.venv/bin/python $(soak_program) soft0
else
	@.venv/bin/python -m compileall -q ndpy tests
	.venv/bin/ndpy vm run $(SOFTROCE) --adapter $(ADAPTER) --limit $$((SOAK_S + 300)) -- \
	    .venv/bin/python $(soak_program) $(ADAPTER)0
endif

COUNT ?= 300
SEED ?= 1
PLACES ?= unit softnd softnd1 rxe
FILES ?=

LOGIC ?=
NOTHING ?=
JOBS ?= 2

# See tests/mutants/README.md.
ifneq ($(LOGIC),)
mutants:
	@rig/setup.sh soft
	@.venv/bin/python tests/mutants/logic.py --jobs $(JOBS) $(ARGS)
else ifneq ($(NOTHING),)
mutants:
	@rig/setup.sh soft
	@.venv/bin/python tests/mutants/nothing.py --jobs $(JOBS) $(ARGS)
else
mutants: windows
	$(MAKE) -s -C tests/networkdirect/providers
	@.venv/bin/python -m compileall -q ndpy tests
	nice -n 19 .venv/bin/python tests/mutants/run.py --count $(COUNT) --seed $(SEED) --places $(PLACES) \
	    $(if $(FILES),--files $(FILES)) --json .rig/mutants/results.json $(ARGS)
endif

# See benchmarks/README.md.
bench: windows
	@rig/setup.sh bench
	@.venv/bin/python -m compileall -q ndpy
	@$(MAKE) -s -C softrdma build/networkdirect_calls.exe
	@.venv/bin/python benchmarks/bench.py

# With one processor whose clock counts instructions, so that the results are the same on every machine.
bench-cache: setup
	@.venv/bin/python -m compileall -q ndpy
	.venv/bin/ndpy vm run --vm --icount --adapter rxe -- .venv/bin/python benchmarks/registration_cache.py rxe0

# On one processor whose clock counts instructions, as `make bench`.
bench-asyncio: setup
	@.venv/bin/python -m compileall -q ndpy benchmarks
	.venv/bin/ndpy vm run --vm --icount --adapter rxe --limit 5000 -- .venv/bin/python benchmarks/loops_asyncio.py rxe0

# On this machine, by its clock: only the ratios mean something, and only if nothing else runs.
bench-peers:
	@rig/setup.sh peers
	@.venv/bin/python -m compileall -q ndpy benchmarks
	.venv/bin/python benchmarks/peers.py --json bench-peers.json

bench-scale: venv
	@.venv/bin/python -m compileall -q ndpy benchmarks
	.venv/bin/python benchmarks/scale.py --json bench-scale.json --plot bench-scale.png --plot bench-scale.svg

softverbs: venv
	@ls -l ndpy/platforms/verbs/soft

softnd: setup
	$(MAKE) -C softrdma build/softnd.dll

softnd-check: setup
	$(run_tests) softnd fuzz peers softnd-siw

softnd-fuzz: setup
	$(MAKE) -C softrdma/fuzz test fuzz SECONDS=60

softrdma-coverage: setup
	@rig/coverage-softrdma.sh

soft-bench: setup
	$(MAKE) -s -C softrdma soft-bench
	-.venv/bin/ndpy vm run $(SOFTROCE) --adapter rxe --limit 900 -- softrdma/build/soft_bench --device rxe0 --gid 1

softnd-bench: softnd
	$(MAKE) -s -C softrdma build/bench.exe
	rig/wine-python --run softrdma/build/bench.exe 'softrdma\build\softnd.dll'

bench-windows: windows
	@$(MAKE) -s -C softrdma build/networkdirect_calls.exe
	@.venv/bin/python benchmarks/bench.py --part softnd .rig/bench-windows.json

# On rxe twice: with one processor and a clock that counts instructions, and with two processors and the machine's clock.
bench-register: windows
	@.venv/bin/python -m compileall -q ndpy benchmarks
	.venv/bin/ndpy vm run --vm --icount --adapter rxe --limit 600 -- .venv/bin/python benchmarks/registration.py rxe0
	.venv/bin/ndpy vm run --vm --adapter rxe --limit 600 -- .venv/bin/python benchmarks/registration.py rxe0
	NDPY_PROVIDER='softrdma\build\softnd.dll' NDPY_FAULTS=benchmarks/slow_registration.scenario rig/wine-python benchmarks/registration.py softnd0

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	git ls-files '*.c' '*.h' | xargs .venv/bin/clang-format --dry-run -Werror
	.venv/bin/mypy
	.venv/bin/python rig/prose.py

docs:
	@rig/setup.sh docs
	.venv/bin/python docs/build.py

wheels:
	@rig/setup.sh wine
	@rig/zig.sh
	@rig/wheels.sh

clean:
	$(MAKE) -s -C softrdma clean
	rm -rf .venv .rig build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache ndpy/_verbs.c
	rm -rf ndpy/platforms/verbs/soft
	rm -f ndpy/_*.so ndpy/_*.pyd
	find ndpy tests examples cdefs -name __pycache__ -type d -prune -exec rm -rf {} +
