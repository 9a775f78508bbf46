import torch, numpy as np, kernels
from models import FusedTransformerConv
dev='cuda'
rng=np.random.default_rng(0)
def edges(R,C,E):
    return torch.from_numpy(np.stack([rng.integers(0,C,E),np.where(rng.random(E)<.1,5,rng.integers(0,R,E))])).to(dev)
for (R,C,E) in ((1000,1000,6000),(517,900,9000)):
    ei=edges(R,C,E)
    for h,d in ((8,16),(1,128),(4,32),(1,64),(16,64),(1,256)):
        for dt in (torch.float16,torch.float32):
            q,k,v=(torch.randn(n,h,d,device=dev,dtype=dt,requires_grad=True) for n in (R,C,C))
            plan=kernels.plan_attention(ei,shape=(R,C),dtype=dt,head_dim=d,num_heads=h,backward=True)
            for _ in range(2): plan(q,k,v,dropout=0.1).float().square().sum().backward()
for dt in (torch.bfloat16,torch.float32):
    for ed in (None,8):
        l=FusedTransformerConv(128,16,heads=8,edge_dim=ed).to(dev,dt)
        for (R,C,E) in ((1000,1000,6000),(517,900,9000)):
            x=torch.randn(C,128,device=dev,dtype=dt,requires_grad=True); a=None if ed is None else torch.randn(E,ed,device=dev,dtype=dt)
            l(x if R==C else (x,x[:R]),edges(R,C,E),a).float().square().sum().backward()
torch.cuda.synchronize(); print('sanitizer workload done')
