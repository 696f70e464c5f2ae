import jax, pytest
from tests.parity.test_pipelines import *
@pytest.mark.parametrize("schedule,layers,axes",[("1f1b",5,dict()),("1f1b",5,dict(fsdp=2,tensor=2)),("interleaved",7,dict(data=2,fsdp=2)),("gpipe",3,dict(fsdp=4))])
def test_uneven(schedule,layers,axes):
    r=parity(tick_table(schedule,2),layers=layers,**axes)
    print(r)
    assert r.ok, f"\n{r}"
def test_uneven4():
    r=parity(tick_table("1f1b",4),layers=6,tensor=2)
    assert r.ok, f"\n{r}"
