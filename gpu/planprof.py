import sys, time, io, cProfile, pstats
from pathlib import Path
import torch, kernels
from bench import cli
from configs.layers_bench_schema import LayersBenchConfig
from bench.layer_batches import *
from functools import cache
out=Path(sys.argv[1]); prof='--prof' in sys.argv
s=cli.read_config(Path('configs/bench/layers.yaml'),['data.source=file'],LayersBenchConfig)
load=cache(s.data.load); dev=torch.device('cuda:0')
def blocks(name):
    w=s.data.workloads[name]; lw=LoadedWorkload.of(name,w,load(w.graph))
    b=draw_batches(lw,layers=len(w.fan_out) or 1,columns=128,count=1,seed=0)[0].to(dev,torch.float32)
    return [(x.edge_index,(x.num_targets,x.num_sources)) for x in b.distinct_blocks]
cases={'mol1024':blocks('molecules-1024')[0],'mol256':blocks('molecules-256-edges')[0],'block146k':blocks('sampled-8192')[0],'arxiv':blocks('arxiv')[0]}
three=blocks('sampled-1024')
def host(fn,n=100,warm=20):
    for _ in range(warm): fn()
    torch.cuda.synchronize(); ts=[]
    for i in range(n):
        if i%10==0: torch.cuda.synchronize()
        t=time.perf_counter(); fn(); ts.append((time.perf_counter()-t)*1e3)
    torch.cuda.synchronize(); ts.sort(); return ts[len(ts)//2], ts[len(ts)//10]
def gpu(fn,n=20):
    from bench.gpu_trace import trace_gpu
    t=trace_gpu(lambda:[fn() for _ in range(n)]); return t.busy_ms/n*1e3,t.kernels/n,t.waits/n
fns={}
for name,(ei,shape) in cases.items():
    for h,d,dt in ((8,16,torch.bfloat16),(1,128,torch.bfloat16)):
        for ed in ((False,True) if name!='arxiv' else (False,)):
            fns[f"{name} {h}x{d} {'edata' if ed else ''}"]=lambda ei=ei,shape=shape,h=h,d=d,dt=dt,ed=ed: kernels.plan_attention(ei,shape=shape,dtype=dt,head_dim=d,num_heads=h,backward=True,edge_data=ed,check=False)
fns['plan_many 3 8x16']=lambda: kernels.plan_many(three,dtype=torch.bfloat16,head_dim=16,num_heads=8,backward=True)
times={k:host(f) for k,f in fns.items()}
if '--teardown' in sys.argv:
    import os
    gpu(fns['mol1024 8x16 ']); print('after trace', host(fns['mol1024 8x16 ']))
    os.environ['TEARDOWN_CUPTI']='1'; gpu(fns['mol1024 8x16 ']); print('after trace with teardown', host(fns['mol1024 8x16 ']))
for k,f in fns.items():
    g=gpu(f); print(f"{k:24} ms {times[k][0]:6.3f} p10 {times[k][1]:6.3f}  GPU us {g[0]:7.1f} kernels {g[1]:4.1f} waits {g[2]:3.1f}",flush=True)
if prof:
    ei,shape=cases['block146k']
    for h,d,ed in ((8,16,False),(8,16,True),(1,128,False)):
        fn=lambda: kernels.plan_attention(ei,shape=shape,dtype=torch.bfloat16,head_dim=d,num_heads=h,backward=True,edge_data=ed,check=False)
        p=cProfile.Profile(); torch.cuda.synchronize(); p.enable()
        for _ in range(300): fn()
        p.disable(); torch.cuda.synchronize()
        f=io.StringIO(); st=pstats.Stats(p,stream=f); st.sort_stats('tottime').print_stats(45); st.sort_stats('cumulative').print_stats(45)
        (out/f'plan_{h}x{d}_{ed}.txt').write_text(f.getvalue())
