[ -d .gpu-site/packages ] || tar xJf .gpu-pack/site.txz
export PYTHONPATH=.:.gpu-site/packages FUSED3S_TEST_DATA=$PWD/.gpu-site/data FUSED3S_COMMIT=720d7e1-clean; mkdir -p datasets; ln -sf $PWD/.gpu-site/data/*/*.npz datasets/
timeout 200 python3 scripts/bench_layers.py --config configs/bench/layers.yaml --set data.source=file --results $OUT/layers.csv --again > $OUT/layers.txt 2>&1
timeout 200 python3 scripts/bench_kernels.py --config configs/bench/float32.yaml --set data.source=file --set 'data.names=[cora,citeseer,pubmed,musae-github,ogbg-molhiv,zinc12k-val-test,facebook-large,elliptic,soc-epinions1,ogbn-arxiv,peptides,ego-twitter,fb100-cornell5,superpixel-bsds500]' --set data.batch_size=1000 --results $OUT/float32.csv --again > $OUT/float32.txt 2>&1; tail -3 $OUT/float32.txt | cut -c1-300; cut -d, -f1 $OUT/float32.csv | wc -l
python3 - <<'P'
import os
for l in open(os.environ['OUT']+'/layers.txt'):
    if l.startswith('│'):
        c=[x.strip() for x in l.split('│')[1:-1]]; print(' | '.join(c)[:125], c[-1][:60])
P
