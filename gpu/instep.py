import sys, time, gc
from pathlib import Path
import torch
from bench import cli
from configs.layers_bench_schema import LayersBenchConfig
from bench.layer_batches import *
from bench.layer_model import *
from bench.layers import Models, pyg_layer
from functools import cache, wraps
T={}
def wrap(owner,name,label=None):
    f=getattr(owner,name); label=label or name; T.setdefault(label,[0,0.0])
    r=T[label]
    def g(*a,**k):
        t=time.perf_counter()
        try: return f(*a,**k)
        finally:
            r[0]+=1; r[1]+=time.perf_counter()-t
    setattr(owner,name,g)
import models.planned_edges as pe, models.transformer_conv as tc, models.joint_layer as jl, models.joint_parameters as jp
import kernels.attention as at, kernels.plan as pl
import kernels.backends.fused3s_planning as fp, kernels.formats.gpu_plan as gp, kernels.runtime.readback as rb, kernels.formats.gpu_csr as gc_
import kernels.backends.fused3s as fs, kernels.backends.fused3s_edges as fe, kernels.backends.fused3s_edges_backward as feb
import kernels.runtime.launch as ln
from models import FusedTransformerConv
wrap(tc,'plan_edge_index'); wrap(pe,'plan_attention'); wrap(tc,'bind_features')
wrap(at,'_choose'); wrap(at,'resolve_device'); wrap(at,'graph_record'); wrap(at,'edge_order')
wrap(fs,'plan_graph'); wrap(fp,'queue_plan'); wrap(fp,'new_plan'); wrap(gp.GPUPlan,'__init__','GPUPlan.init'); wrap(gp.GPUPlan,'fill','GPUPlan.fill'); wrap(gp,'launch_all'); wrap(gp,'allocate'); wrap(gc_.GPUCSR,'__init__','GPUCSR.init'); wrap(gc_.GPUCSR,'launches','GPUCSR.launches')
wrap(fp.MadePlan,'unchecked'); wrap(fp,'Readback'); wrap(fs,'_compile'); wrap(pl.AttentionPlan,'__post_init__'); wrap(fp.PlanProgress,'plan','progress.plan'); wrap(fp.MadePlan,'exact')
wrap(tc,'attend_jointly'); wrap(jl,'_apply_layer'); wrap(jl.functional,'linear'); wrap(fe,'launch_kernel','fwd launch_kernel'); wrap(fe,'semaphores'); wrap(fs,'launch_edge_kernel'); wrap(jl.torch,'add')
wrap(jp,'join_parameters'); wrap(tc,'joint_parameters'); wrap(jp.JointMemory,'join')
wrap(feb,'launch_kernel','bwd launch_kernel'); wrap(feb,'_launch','bwd _launch'); wrap(jl,'gradients'); wrap(jl,'parameter_gradients'); wrap(jl,'_backward'); wrap(torch,'mm')
s=cli.read_config(Path('configs/bench/layers.yaml'),['data.source=file'],LayersBenchConfig)
load=cache(s.data.load); dev=torch.device('cuda:0')
for spec in sys.argv[1].split(','):
    name,prec=spec.split(':')
    w=s.data.workloads[name]; lw=LoadedWorkload.of(name,w,load(w.graph))
    L=len(w.fan_out) or s.model.layers
    types=TYPES[prec]; bs=[b.to(dev,types.parameters) for b in draw_batches(lw,layers=L,columns=128,count=s.measure.pool,seed=s.measure.seed)]
    models=Models(s,L,w.edge_dim,dev)
    st=TrainingStep(models.of(FusedTransformerConv,types.parameters),types)
    new=lambda b: b.with_new_edges() if w.is_new else b
    for i in range(12): st(new(bs[i%len(bs)]))
    own=[new(bs[i%len(bs)]) for i in range(100)]
    torch.cuda.synchronize()
    for r in T.values(): r[0]=0; r[1]=0.
    t=time.perf_counter()
    for b in own: st(b)
    torch.cuda.synchronize(); tot=(time.perf_counter()-t)*10
    print(f"== {spec} {tot:.2f} ms a step")
    for k,r in T.items():
        if r[0]: print(f"{k:22} {r[0]/100:5.1f} a step, {r[1]/r[0]*1e6:7.1f} us each, {r[1]*1e4:8.1f} us a step")
