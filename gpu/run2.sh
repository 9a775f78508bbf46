[ -d .gpu-site/packages ] || tar xJf .gpu-pack/site.txz
export PYTHONPATH=.:.gpu-site/packages FUSED3S_TEST_DATA=$PWD/.gpu-site/data; mkdir -p datasets; ln -sf $PWD/.gpu-site/data/*/*.npz datasets/
python3 gpu/planprof.py $OUT --teardown 2>&1 | tail -25
python3 gpu/hostprof.py $OUT cora:bfloat16,github:bfloat16,sampled-8192:float32,sampled-8192:autocast,sampled-1024:bfloat16,molecules-256-edges:float32,molecules-1024:bfloat16 2>&1 | grep total
timeout 150 python3 -m pytest -q -n 14 -m gpu --dist worksteal tests/kernels/runtime tests/models tests/kernels/test_gpu_plans.py tests/kernels/test_plan_room.py tests/kernels/test_captured_step.py tests/kernels/test_plan.py tests/kernels/test_edge_data.py -x > $OUT/t.txt 2>&1; tail -4 $OUT/t.txt
