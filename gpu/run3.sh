[ -d .gpu-site/packages ] || tar xJf .gpu-pack/site.txz
export PYTHONPATH=.:.gpu-site/packages FUSED3S_TEST_DATA=$PWD/.gpu-site/data; mkdir -p datasets; ln -sf $PWD/.gpu-site/data/*/*.npz datasets/
python3 gpu/instep.py sampled-8192:bfloat16,molecules-256-edges:float32 2>&1 | grep -v Warn
sed -i "s/if '--teardown'/if 0 and '--teardown'/" gpu/planprof.py; python3 gpu/planprof.py $OUT 2>&1 | grep kernels
