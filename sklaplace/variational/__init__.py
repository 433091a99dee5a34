from sklaplace.variational.gaussian import Gaussian
from sklaplace.variational.kumaraswamy import Kumaraswamy
from sklaplace.variational.quantile import Quantile
from sklaplace.variational.density import Density
POSTERIORS = {k.name:k for k in (Gaussian,Kumaraswamy,Quantile,Density)}
