[ -d .gpu-site/packages ] || tar xJf .gpu-pack/site.txz
export PYTHONPATH=.:.gpu-site/packages FUSED3S_TEST_DATA=$PWD/.gpu-site/data FUSED3S_COMMIT=88f2410-clean; mkdir -p datasets; ln -sf $PWD/.gpu-site/data/*/*.npz datasets/
timeout 150 python3 scripts/bench_layers.py --config configs/bench/layers.yaml --set data.source=file --results $OUT/layers.csv --again > $OUT/layers.txt 2>&1
timeout 300 python3 scripts/bench_kernels.py --config configs/bench/float32.yaml --set data.source=file --set 'data.names=[cora,citeseer,pubmed,musae-github,ogbg-molhiv,zinc12k-val-test,facebook-large,elliptic,soc-epinions1,ogbn-arxiv,peptides,ego-twitter,fb100-cornell5,superpixel-bsds500]' --set data.batch_size=1000 --results $OUT/float32.csv --again > $OUT/float32.txt 2>&1; tail -3 $OUT/float32.txt
python3 gpu/planprof.py $OUT 2>&1 | grep kernels
timeout 90 /usr/local/cuda/bin/compute-sanitizer --tool memcheck python3 gpu/san.py 2>&1 | tail -4
python3 - <<'P'
for l in open('$OUT/layers.txt'.replace('$OUT',__import__('os').environ['OUT'])):
    if l.startswith('│'):
        c=[x.strip() for x in l.split('│')[1:-1]]; print(' | '.join(c)[:125])
P
