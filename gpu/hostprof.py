import sys, time, os, cProfile, pstats, io, gc
from pathlib import Path
import torch
from bench import cli
from configs.layers_bench_schema import LayersBenchConfig
from bench.layer_batches import *
from bench.layer_model import *
from bench.layers import Models, pyg_layer
from models import FusedTransformerConv
from functools import cache
out=Path(sys.argv[1]); which=sys.argv[2].split(','); prof='--prof' in sys.argv
s=cli.read_config(Path('configs/bench/layers.yaml'),['data.source=file'],LayersBenchConfig)
load=cache(s.data.load)
dev=torch.device('cuda:0')
class Plain(torch.nn.Module):
    def __init__(self,i,o,heads=1,edge_dim=None):
        super().__init__(); self.l=torch.nn.ModuleList([torch.nn.Linear(i,i) for _ in range(4)]+([torch.nn.Linear(edge_dim,i,bias=False)] if edge_dim else []))
    def forward(self,x,ei,ea=None):
        t=x if isinstance(x,torch.Tensor) else x[1]
        return self.l[0](t)
def renew(b,new): return b.with_new_edges() if new else b
for spec in which:
    name,prec=spec.split(':')
    w=s.data.workloads[name]; lw=LoadedWorkload.of(name,w,load(w.graph))
    L=len(w.fan_out) or s.model.layers
    cpu=draw_batches(lw,layers=L,columns=128,count=s.measure.pool,seed=s.measure.seed)
    types=TYPES[prec]; bs=[b.to(dev,types.parameters) for b in cpu]
    models=Models(s,L,w.edge_dim,dev)
    steps={'ours':TrainingStep(models.of(FusedTransformerConv,types.parameters),types),'pyg':TrainingStep(models.of(pyg_layer(),types.parameters),types),
      'plain':TrainingStep(LayerModel(Plain,s.model.head_shape,L,w.edge_dim).to(dev,types.parameters),types)}
    new=w.is_new
    for st in steps.values():
        for i in range(12): st(renew(bs[i%len(bs)],new))
    torch.cuda.synchronize()
    def parts(st,n):
        acc=[0.]*4
        own=[renew(bs[i%len(bs)],new) for i in range(n)]
        torch.cuda.synchronize(); t00=time.perf_counter()
        for b in own:
            t0=time.perf_counter()
            st.optimiser.zero_grad(set_to_none=True)
            with torch.autocast('cuda',torch.bfloat16,enabled=types.autocast):
                o=st.model(b); t1=time.perf_counter()
                loss=cross_entropy(o.float(),b.labels,ignore_index=IGNORED)
            t2=time.perf_counter(); loss.backward(); t3=time.perf_counter(); st.optimiser.step(); t4=time.perf_counter()
            for i,(a,c) in enumerate(((t0,t1),(t1,t2),(t2,t3),(t3,t4))): acc[i]+=c-a
        torch.cuda.synchronize(); tot=time.perf_counter()-t00
        return [tot/n*1e3]+[a/n*1e3 for a in acc]
    res={}
    for r in range(5):
        for k,st in steps.items(): res.setdefault(k,[]).append(parts(st,40))
    for k,v in res.items():
        med=sorted(v)[2]
        print(f"{spec:28} {k:6} total {med[0]:6.2f}  fwd {med[1]:5.2f} loss {med[2]:5.2f} bwd {med[3]:5.2f} opt {med[4]:5.2f}",flush=True)
    if prof:
        st=steps['ours']
        own=[renew(bs[i%len(bs)],new) for i in range(60)]
        torch.autograd.set_multithreading_enabled(False)
        p=cProfile.Profile(); gc.collect(); torch.cuda.synchronize(); p.enable()
        for b in own: st(b)
        p.disable(); torch.autograd.set_multithreading_enabled(True); torch.cuda.synchronize()
        for key in ('tottime','cumulative'):
            f=io.StringIO(); pstats.Stats(p,stream=f).sort_stats(key).print_stats(70)
            (out/f'prof_{name}_{prec}_{key}.txt').write_text(f.getvalue())
        from torch.profiler import profile, ProfilerActivity
        own=[renew(bs[i%len(bs)],new) for i in range(20)]
        with profile(activities=[ProfilerActivity.CPU,ProfilerActivity.CUDA]) as pr:
            for b in own: st(b)
            torch.cuda.synchronize()
        (out/f'ops_{name}_{prec}.txt').write_text(pr.key_averages().table(sort_by='self_cpu_time_total',row_limit=60,max_name_column_width=60)+'\n'+pr.key_averages().table(sort_by='self_cuda_time_total',row_limit=40,max_name_column_width=90))
